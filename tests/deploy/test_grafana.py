"""The dashboard asks for metrics that exist, by labels that they have, from a source that is provisioned."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_compose import OBSERVERS

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy/grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards/fissile.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES += [variable["definition"] for variable in VARIABLES.values() if variable["type"] == "query"]

OF_SCRAPING = {"instance", "job", "le"}
OF_THE_CLIENT = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def documented():
    """Names as queries write them, with their labels; a test holds the documentation to what services tell."""
    table = (ROOT / "docs/operations.md").read_text()
    names = {name: set() for name in OF_THE_CLIENT}
    for name, kind, labels in re.findall(r"^\| `(fissile_\w+)` \| (\w+) \| ([\w, ]*?) ?\|", table, re.MULTILINE):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for suffix in suffixes:
            names[name + suffix] = set(filter(None, labels.split(", ")))
    return names


def grouping(query):
    return {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}


@pytest.mark.parametrize("query", sorted(set(QUERIES)))
def test_every_query_is_of_a_metric_that_exists_and_of_labels_that_it_has(query):
    known = documented()
    asked = set(re.findall(r"\b(?:fissile|process)_\w+", query))
    assert asked and asked <= known.keys()
    labels = grouping(query) | set(re.findall(r"(\w+)=~?\"", query)) | set(re.findall(r", (\w+)\)$", query))
    for name in asked:
        assert labels <= known[name] | OF_SCRAPING
    assert set(re.findall(r"\$(\w+)", query)) <= VARIABLES.keys() | {"__rate_interval"}
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_counters_are_asked_for_their_rate_and_histograms_for_quantiles():
    for query in QUERIES:
        if re.search(r"_(total|sum|count|bucket)\b", query):
            assert "rate(" in query, query
        assert ("_bucket" in query) == query.startswith("histogram_quantile("), query


def test_what_legends_say_is_in_the_result():
    for panel in PANELS:
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= (grouping(target["expr"]) or OF_SCRAPING), panel["title"]


def test_panels_have_units_places_and_the_source_that_is_chosen():
    taken = set()
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["title"]
        assert panel["datasource"]["uid"] == "$datasource"
        x, y, width = (panel["gridPos"][key] for key in ("x", "y", "w"))
        cells = {(column, y) for column in range(x, x + width)}
        assert x + width <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_grafana_finds_its_dashboards_and_sources():
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/fissile.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in OBSERVERS["grafana"]["volumes"])
    assert mounted[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/fissile.yml").read_text())["datasources"]
    assert VARIABLES["datasource"]["current"]["value"] in {source["uid"] for source in sources}
    for source in sources:
        assert re.match(r"http://(\w+):", source["url"])[1] in OBSERVERS
