"""What all frameworks are asked. Short answers: enumerations and truths, nothing that a small model can draw out."""

from typing import Literal

from pydantic import BaseModel, Field

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"] = Field(description="Its name.")
    is_capital: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a city.",
        "parameters": City.model_json_schema(),
    },
}
