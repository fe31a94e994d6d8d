"""What a real server exports, and the dashboard that reads it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sgl_importance.metrics_table import METRICS, PREFIX, TIER, Kind, Metric
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.prewarms import ended
from support.servers import ServerProcess, free_port
from support.waiting import HANG_SECONDS

pytestmark = pytest.mark.server

MONITORING = Path(__file__).parents[2] / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
INTERVAL_SECONDS = 1
# Those of storage tiers carry the names of a chain's tiers, and this server has no chain.
EXPORTED = [metric for metric in METRICS if not metric.name.startswith(TIER)]
_EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES = [expression for expression in _EXPRESSIONS if PREFIX + TIER not in expression]


def scraped(server: ServerProcess) -> dict[str, dict[str, set[str]]]:
    """Labels and their values, by name of the series; and the types, under ``# TYPE``."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{server.base_url}/metrics", trust_env=False).raise_for_status().text
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                labels = found.setdefault(sample.name, {"# TYPE": {family.type}})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def busy(server: ServerProcess) -> ServerProcess:
    """The server after a few requests, a snapshot and a pre-warm whose prompt was then asked for."""
    document = make_document(400, 300)
    for name in list(document.records)[:3]:
        server.generate(encode(document.messages(name)), max_new_tokens=4)
    server.get("/kv_importance")
    prompt = [7 + i % 40 for i in range(256)]
    ended(server, server.post("/kv_importance/prewarm", {"input_ids": prompt})["job_id"])
    server.generate(prompt, max_new_tokens=2)
    return server


def test_the_server_exports_the_table_and_nothing_else(busy: ServerProcess):
    found = scraped(busy)
    assert set(found) == {name for metric in EXPORTED for name in metric.series}


@pytest.mark.parametrize("metric", EXPORTED, ids=lambda metric: metric.name)
def test_type_and_labels_are_those_of_the_table(busy: ServerProcess, metric: Metric, exported: dict):
    labels = dict(exported[metric.series[0]])
    if metric.kind is Kind.HISTOGRAM:
        assert {float(bound) for bound in labels.pop("le")} == {*metric.bounds, float("inf")}
    assert labels.pop("# TYPE") == {metric.kind.value}
    assert set(labels) == set(metric.labels)
    for label, values in metric.labels.items():
        assert labels[label] >= set(values), "every value that is known ahead is exported from the start"


@pytest.fixture(scope="module")
def exported(busy: ServerProcess) -> dict[str, dict[str, set[str]]]:
    return scraped(busy)


def test_a_pre_warm_moves_its_series_and_a_request_does_not(busy: ServerProcess):
    names = [metric.exported_name for metric in METRICS if metric.name.startswith("prewarm_")]
    moved = {name: busy.metric(name) for name in names}
    assert {name for name, value in moved.items() if value == 0} == {f"{PREFIX}prewarm_refused_tokens_total"}
    assert busy.metric(f"{PREFIX}prewarmed_hit_tokens_total") >= 240
    busy.generate([3] * 64, max_new_tokens=2)
    assert {name: busy.metric(name) for name in names} == moved


def test_emission_and_operations_are_timed(busy: ServerProcess):
    timed = ("emissions_total", "emission_seconds_total")
    before = [busy.metric(PREFIX + name) for name in timed]
    snapshots = busy.metric(f"{PREFIX}operations_total", operation="snapshot")
    busy.get("/kv_importance")
    assert busy.metric(f"{PREFIX}operations_total", operation="snapshot") == snapshots + 1
    assert [busy.metric(PREFIX + name) for name in timed] == before, "a snapshot observes no attention"
    busy.generate([5] * 64, max_new_tokens=2)
    after = [busy.metric(PREFIX + name) for name in timed]
    assert all(new > old for new, old in zip(after, before, strict=True))
    assert busy.metric(f"{PREFIX}operations_total", operation="snapshot") == snapshots + 1


# ---- the dashboard ----


def test_the_dashboard_has_a_row_for_each_question_and_a_unit_on_each_panel():
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert len(rows) == 9
    assert all(row.endswith("?") for row in rows)
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "instance"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("query", QUERIES)
def test_every_series_and_label_of_a_query_is_exported(query: str, exported: dict):
    names = re.findall(rf"({PREFIX}\w+)\{{([^}}]*)\}}", query)
    assert names
    for name, selector in names:
        for label in re.findall(r"(\w+)=", selector):
            assert label == "instance" or label in exported[name], (name, label)
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    assert grouped <= {label for name, _ in names for label in exported[name]}


@pytest.fixture(scope="module")
def prometheus(busy: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that has scraped the server at least three times."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not on PATH")
    folder = tmp_path_factory.mktemp("prometheus")
    config = (MONITORING / "prometheus.yml").read_text()
    config, changes = re.subn(r"127\.0\.0\.1:30000", f"127.0.0.1:{busy.port}", config)
    assert changes == 1
    (folder / "prometheus.yml").write_text(config.replace("15s", f"{INTERVAL_SECONDS}s"))
    port = free_port()
    command = [
        *(binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=HANG_SECONDS
        ) as client:
            _wait_until(lambda: _is_ready(port, client) and _scrapes(client) >= 1, folder)
            busy.generate([9] * 200, max_new_tokens=4)
            seen = _scrapes(client)
            _wait_until(lambda: _scrapes(client) >= seen + 2, folder)
            yield client
    finally:
        process.terminate()
        process.wait(20)


def _is_ready(port: int, client: httpx.Client) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0 and client.get("/-/ready").status_code == 200


def _scrapes(client: httpx.Client) -> int:
    query = f"count_over_time({PREFIX}requests_total[5m])"
    result = client.get("/api/v1/query", params={"query": query}).json()["data"]["result"]
    return int(result[0]["value"][1]) if result else 0


def _wait_until(holds, folder: Path) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
        time.sleep(0.1)


def ask(client: httpx.Client, query: str) -> list[dict]:
    query = query.replace("$__rate_interval", f"{10 * INTERVAL_SECONDS}s").replace("$instance", ".*")
    answer = client.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer.get("error"))
    return answer["data"]["result"]


@pytest.mark.parametrize("query", QUERIES)
def test_prometheus_answers_every_query_of_the_dashboard(prometheus: httpx.Client, query: str):
    assert ask(prometheus, query), query


def test_the_hit_ratio_of_the_dashboard_is_that_of_the_server(prometheus: httpx.Client, busy: ServerProcess):
    query = next(query for query in QUERIES if "hit_tokens_total" in query and "prompt_tokens_total" in query)
    lifetime = re.sub(r"rate\(([^\[]*)\[\$__rate_interval\]\)", r"\1", query)
    shown = {row["metric"]["tier"]: float(row["value"][1]) for row in ask(prometheus, lifetime)}
    prompts = busy.metric(f"{PREFIX}prompt_tokens_total")
    for tier in ("device", "host", "storage"):
        assert shown[tier] == pytest.approx(busy.metric(f"{PREFIX}hit_tokens_total", tier=tier) / prompts)
    assert shown["device"] > 0
