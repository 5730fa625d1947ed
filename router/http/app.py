"""The routes, and what stands around them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from fissile.errors import FissileError, InternalError, NotFoundError
from fissile.v1 import ListModelsRequest, Model
from router.api import GenerationApi
from router.callers.callers import Callers
from router.http.answers import Json
from router.http.callers import caller_of
from router.http.endpoints import KEEP_ALIVE_SECONDS, Chat, Completions
from router.http.errors import error_object, headers_of, plain_error, status_of
from router.http.middleware import BodyBounds, FaultLog, Identification, WholeBody


@dataclass(frozen=True, slots=True)
class AppConfig:
    body: BodyBounds
    callers: Callers = field(default_factory=Callers)
    allowed_origins: Sequence[str] = ()
    """Of web pages whose scripts may use the front."""
    keep_alive: float = KEEP_ALIVE_SECONDS


def build_app(api: GenerationApi, is_ready: Callable[[], bool], config: AppConfig) -> ASGIApp:
    """`is_ready`: whether a request would succeed."""
    models = _Models(api)

    async def health(_request: Request) -> Response:
        ready = is_ready()
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    middleware = [
        Middleware(Identification, callers=config.callers),
        Middleware(WholeBody, bounds=config.body),
    ]
    starlette = Starlette(
        routes=[
            Route("/v1/completions", Completions(api, config.keep_alive), methods=["POST"]),
            Route("/v1/chat/completions", Chat(api, config.keep_alive), methods=["POST"]),
            Route("/v1/models", models.all, methods=["GET"]),
            # A path: the names of hub models have a slash.
            Route("/v1/models/{model:path}", models.one, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        middleware=middleware,
        exception_handlers={FissileError: _fissile_error, HTTPException: _http_error, Exception: _fault},
    )
    starlette.router.redirect_slashes = False  # an answer without a word, which most clients do not follow
    app = FaultLog(starlette)
    if not config.allowed_origins:
        return app
    # Around everything: a browser asks without a key whether it may ask, and shows its page no error without headers.
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


class _Models:
    def __init__(self, api: GenerationApi) -> None:
        self._api = api
        self._started = int(time.time())
        """Stands for the day the model was made, which nobody knows."""

    async def all(self, request: Request) -> Response:
        models = (await self._api.list_models(ListModelsRequest(), caller_of(request))).models
        return JSONResponse(
            {"object": "list", "data": [self._json(model, name) for model in models for name in _names(model)]}
        )

    async def one(self, request: Request) -> Response:
        name = request.path_params["model"]
        for model in (await self._api.list_models(ListModelsRequest(), caller_of(request))).models:
            if name in _names(model):
                return JSONResponse(self._json(model, name))
        raise NotFoundError(f"model {name!r} is not served here")

    def _json(self, model: Model, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "fissile",
            "root": model.id,
            "max_model_len": model.max_model_len,
        }


def _names(model: Model) -> list[str]:
    """What clients find and may ask for: the id first."""
    return [model.id, *model.aliases]


async def _fissile_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, FissileError)
    return JSONResponse(error_object(error), status_of(error), headers_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the routes: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        message += f"; there are {', '.join(_paths(request.app.routes))}"
    return JSONResponse(plain_error(message), error.status_code, error.headers)


def _paths(routes: Sequence[BaseRoute]) -> list[str]:
    """Without those that are a family."""
    return [route.path for route in routes if isinstance(route, Route) and "{" not in route.path]


async def _fault(_request: Request, _error: Exception) -> Response:
    """Ours. It is raised again after this, and logged around the app."""
    return JSONResponse(error_object(InternalError("internal error; the server's log has the details")), 500)
