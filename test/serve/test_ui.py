"""The live page in a real Chromium, on a real server: what it shows, to whom, and how often it asks."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sgl_importance_lab.probe.tasks import make_document

from support.live_page import NARROW, TREEITEM, WIDE, choose, reused_leaf, shown, tree
from support.servers import ServerProcess

pytestmark = pytest.mark.server


# ---- what it shows ----


def test_the_chart_shows_the_tree_that_the_api_reports(open_page, asked: ServerProcess):
    blocks = shown(open_page())
    document = tree(asked)
    nodes = {str(node["id"]): node for node in document["nodes"]}
    assert set(blocks) == set(nodes)
    scale = max(block["x"] + block["width"] for block in blocks.values()) / max(
        node["depth_tokens"] + node["tokens"] for node in nodes.values()
    )
    for key, node in nodes.items():
        assert blocks[key]["width"] == pytest.approx(node["tokens"] * scale, abs=4)
        assert blocks[key]["x"] == pytest.approx(node["depth_tokens"] * scale, abs=4)
        parent = blocks.get(str(node["parent"]))
        if parent is not None:
            assert parent["y"] <= blocks[key]["y"]
            assert blocks[key]["y"] + blocks[key]["height"] <= parent["y"] + parent["height"] + 0.01


def test_tiers_and_moves_are_those_of_the_api(open_page, asked: ServerProcess):
    page = open_page()
    page.wait_for_selector("#events [data-serial]")
    device = tree(asked)["tiers"]["device"]
    amount = f"{device['used_tokens']:,} of {device['total_tokens']:,} tokens"
    assert amount in page.locator('[data-tier="device"]').inner_text()
    first = page.locator("#events [data-serial]").first
    serial, text = first.evaluate("item => [Number(item.dataset.serial), item.innerText]")
    told = {each["serial"]: each for each in asked.get("/kv_importance/events", limit=4096)["events"]}
    assert f"node {told[serial]['node']}" in text
    assert page.locator("#timeline circle").count() > 0


def test_storage_tiers_of_a_chain_have_cards_of_their_own(open_page, asked: ServerProcess):
    """Their names are texts of a file, and stay texts; a tier that is left out says so."""
    facts = {"kind": "fs", "pages": 30, "capacity_pages": 120, "state": "in use", "note": ""}
    chain = [
        facts | {"name": "fs"},
        facts | {"name": "far", "kind": "rdma", "state": "left out", "note": "<b>x</b>"},
    ]

    def with_chain(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(
            response=answer, json=answer.json() | {"store_tiers": {"ranking": "lru", "tiers": chain}}
        )

    page = open_page()
    page.wait_for_selector("[data-tier=device]")
    assert page.locator("[data-tier]").count() == 3
    page.route("**/kv_importance/tree?*", with_chain)
    page.reload()
    near, far = page.locator('[data-tier="store:fs"]'), page.locator('[data-tier="store:far"]')
    assert "30 of 120 pages" in near.inner_text()
    assert "25 %" in near.inner_text()
    assert "rdma, left out, <b>x</b>" in far.inner_text()
    assert "off" in far.get_attribute("class").split()


def test_ages_and_beginnings_that_change_are_told_in_sentences(open_page, asked: ServerProcess):
    """The text of prompts is that of users, and stays text."""
    place = {
        "sentence": "prompts part at token 40 ('<b>1', then '<b>2') and go on alike",
        "cure": "move it",
        "before": "cch=",
        "variants": ["<b>1", "<b>2"],
        "after": ";",
    }

    def with_beginning(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"volatile": [place]})

    page = open_page()
    page.wait_for_selector("[data-tier=device]")
    assert page.locator("#ages").inner_text() == tree(asked)["ages"]["sentence"]
    assert page.locator("#ages").inner_text().startswith("The device ")
    assert not page.locator("#volatile").is_visible()
    page.route("**/kv_importance/tree?*", with_beginning)
    page.reload()
    told = page.locator("#volatile li")
    assert "then '<b>2') and go on alike. To do: move it." in told.inner_text()
    assert told.locator("mark").all_inner_texts() == ["<b>1", "<b>2"]


def test_a_click_shows_the_node(open_page, asked: ServerProcess):
    leaf = reused_leaf(asked)
    page = open_page()
    choose(page, leaf["id"])
    node = asked.get(f"/kv_importance/node/{leaf['id']}")
    text = page.locator("#node").inner_text()
    assert page.locator("#node .cell").count() == node["pages"] == leaf["tokens"] // 16
    assert f"{node['tokens']} ({node['depth_tokens']} to {node['depth_tokens'] + node['tokens']})" in text
    assert re.search(rf"Later requests\s+{node['queries']}\b", text)
    assert re.search(r"Last move: (entered|split|copied|loaded)", text)
    page.locator("#node .cell").first.hover()
    assert page.locator("#node q").inner_text().strip() == node["text"]["cells"][0].strip()
    ids = asked.get(f"/kv_importance/node/{leaf['id']}/prompt")["input_ids"]
    assert len(ids) == node["depth_tokens"] + node["tokens"]


def test_a_click_on_a_request_shows_both_texts_side_by_side(open_page, asked: ServerProcess):
    first = "Alice copper. " * 40
    changed = first + "<b>Bruno</b> lantern. " * 40
    for text in (first + "Edith ladder. " * 40, changed):
        asked.generate(text, max_new_tokens=1)
    told = asked.get("/kv_importance/why")["requests"][0]
    page = open_page()
    page.locator(f'#requests [data-key="{told["rid"]}"]').click()
    page.wait_for_selector("#why .texts")
    (whole,) = asked.get("/kv_importance/why", rid=told["rid"])["requests"]
    left, right = page.locator("#why .texts mark").all()
    assert left.text_content() == whole["parted"]["known"]
    assert right.text_content() == whole["parted"]["asked"]
    assert left.bounding_box()["x"] < right.bounding_box()["x"]
    assert f"parted at token {whole['parted']['token']:,}" in page.locator("#why").inner_text()
    assert page.locator("#why b").count() == 0
    listed = page.locator("#requests li").first.inner_text()
    assert f"{sum(told['found_tokens'].values()):,} of {told['prompt_tokens']:,} tokens found" in listed


def test_what_is_left_out_is_a_block_that_says_so_and_opens(open_page, asked: ServerProcess):
    bounded = (tree(asked, limit=limit) for limit in range(1, 50))
    part = next(part for part in bounded if any(node["more"]["nodes"] for node in part["nodes"]))
    page = open_page(limit=len(part["nodes"]))
    shown(page)
    left_out = [document["more"] for document in (part, *part["nodes"])]
    wanted = {f"and {m['nodes']} more node" for m in left_out if m["nodes"]}
    labels = [each.get_attribute("aria-label") for each in page.locator("#chart .more").all()]
    assert wanted
    assert {re.match(r"and [\d,]+ more node", label).group() for label in labels} == wanted
    below = page.locator('#chart .more:not([data-key="more-top"])').first
    parent = below.get_attribute("data-key").removeprefix("more-")
    below.click()
    page.wait_for_selector("#trail [aria-current]")
    assert f"node {parent}" in page.locator("#trail").inner_text()
    page.get_by_role("button", name=re.compile("Whole tree")).click()
    page.wait_for_selector("#trail [aria-current]", state="detached")


def test_search_finds_a_prefix(open_page, asked: ServerProcess):
    page = open_page()
    shown(page)
    document = make_document(300, 201)
    content = document.messages(next(iter(document.records)))[-1]["content"]
    page.locator("#search-text").fill(content[:300])
    page.locator("#search-kind").select_option("user")
    page.get_by_role("button", name="Find").click()
    page.wait_for_selector("#node .strip")
    answer = asked.post("/kv_importance/find", {"messages": [{"role": "user", "content": content[:300]}]})
    path = [str(part["id"]) for part in answer["path"]]
    marked = [each.get_attribute("data-key") for each in page.locator("#chart .found").all()]
    assert sorted(marked) == sorted(path)
    assert page.locator("#node-heading").inner_text() == f"Node {path[-1]}"
    assert (
        f"{answer['matched_tokens']} of {answer['tokens']} tokens"
        in page.locator("#search-result").inner_text()
    )
    page.locator("#search-text").fill("scarlet scarlet scarlet")
    page.locator("#search-kind").select_option("text")
    page.get_by_role("button", name="Find").click()
    page.get_by_text("nothing in the cache begins like this").wait_for()


# ---- faults of the server ----


def report_faults(page: Any, faults: dict[str, Any]) -> None:
    """From its next round on, the page gets trees with these ``faults``, as the server would report them."""

    def answer(route: Any) -> None:
        document = route.fetch().json() | {"faults": faults}
        if faults["fallback"] is not None:
            document |= {"nodes": [], "total": NOTHING, "more": NOTHING}
        route.fulfill(json=document)

    page.route("**/kv_importance/tree?*", answer)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").click()


NOTHING = {"nodes": 0, "tokens": 0}
FALLBACK = {"evicts_by": "lru", "place": "ranking", "error": "KeyError: 7", "clock": 1200, "time": 1.8e9}


def test_a_banner_says_that_faults_were_counted_and_goes_when_they_have_gone(open_page):
    page = open_page()
    shown(page)
    banner = page.locator("#faults")
    assert not banner.is_visible()
    report_faults(page, {"counts": {"operation": 2, "report": 1}, "fallback": None})
    banner.wait_for()
    assert banner.inner_text().startswith(
        "3 faults of this server caught and counted (operation 2, report 1). It serves and learns on."
    )
    assert page.locator(TREEITEM).count() > 0
    page.unroute("**/kv_importance/tree?*")
    report_faults(page, {"counts": {}, "fallback": None})
    banner.wait_for(state="hidden")


def test_a_banner_says_that_the_server_evicts_by_lru_and_the_cure(open_page, asked: ServerProcess):
    page = open_page()
    choose(page, reused_leaf(asked)["id"])
    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    report_faults(page, {"counts": {"ranking": 1}, "fallback": FALLBACK})
    page.locator("#faults").wait_for()
    text = page.locator("#faults").inner_text()
    assert text.startswith(
        "Since request 1,200 this server evicts by LRU, until it is restarted: KeyError: 7."
    )
    assert "Restart it, and report the line “KV importance: fault in ranking” of its log." in text
    page.get_by_text("The tree is not followed any more.").wait_for()
    page.get_by_text("Nothing is known of node").wait_for()
    assert not any("/node/" in url for url in asked_for), "the server would refuse"
    page.get_by_role("button", name="Table").click()
    page.get_by_text("live, every").wait_for()


# ---- how it looks, and who can use it ----


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows(open_page, asked: ServerProcess, viewport: dict[str, int], scheme: str):
    page = open_page(viewport=viewport, color_scheme=scheme)
    shown(page)
    choose(page, reused_leaf(asked)["id"])
    page.get_by_role("button", name="Table").click()
    for _ in range(2):
        overflow = page.evaluate(
            """() => [document.documentElement.scrollWidth - document.documentElement.clientWidth,
            ...[...document.querySelectorAll('.card')].map((card) => card.scrollWidth - card.clientWidth)]"""
        )
        assert max(overflow) <= 0
        page.get_by_role("button", name="Chart").click()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3]))
    assert brightness < 150 if scheme == "dark" else brightness > 600


def test_the_tree_is_walked_by_keyboard(open_page, asked: ServerProcess):
    page = open_page()
    shown(page)
    assert page.locator(f'{TREEITEM}[tabindex="0"]').count() == 1
    nodes = tree(asked)["nodes"]
    parent = next(node for node in nodes if any(each["parent"] == node["id"] for each in nodes))
    child = next(node for node in nodes if node["parent"] == parent["id"])
    page.locator("#search-kind").focus()
    for _ in range(2):
        page.keyboard.press("Tab")
    focused = "document.activeElement.dataset.key"
    assert page.evaluate(focused) == str(nodes[0]["id"])
    page.locator(f'#chart [data-key="{parent["id"]}"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == str(child["id"])
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == str(parent["id"])
    page.keyboard.press("Enter")
    page.wait_for_selector("#node .strip")
    assert page.locator('[aria-selected="true"]').get_attribute("data-key") == str(parent["id"])
    page.wait_for_timeout(2500)  # a round later the focus is still there
    assert page.evaluate(focused) == str(parent["id"])
    label = page.locator(f'#chart [data-key="{parent["id"]}"]').get_attribute("aria-label")
    assert label.startswith(f"Node {parent['id']}: {parent['tokens']} tokens from position")


def test_the_table_says_what_the_chart_shows(open_page, asked: ServerProcess):
    page = open_page()
    shown(page)
    page.get_by_role("button", name="Table").click()
    rows = page.locator("#table tbody tr").all()
    nodes = tree(asked)["nodes"]
    assert [row.get_attribute("data-node") for row in rows] == [str(node["id"]) for node in nodes]
    assert f"{nodes[0]['tokens']}" in rows[0].inner_text()
    rows[0].get_by_role("button").press("Enter")
    page.wait_for_selector("#node .strip")


def test_every_control_has_a_name(open_page, asked: ServerProcess):
    page = open_page()
    choose(page, reused_leaf(asked)["id"])
    unnamed = page.evaluate(
        """() => [
            ...document.querySelectorAll('button, input, select, meter, [role=treeitem], [role=img]')
        ].filter((each) => !each.getAttribute('aria-label'))
        .filter((each) => !each.labels?.length && !each.textContent.trim())
        .map((each) => each.outerHTML)"""
    )
    assert unnamed == []


# ---- polling ----


def test_polling_stops_in_a_hidden_tab_and_goes_on_when_it_is_looked_at(open_page):
    page = open_page()
    shown(page)
    asked_for: list[str] = []
    hide = """(hidden) => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(1000)  # a round that had begun asks to its end
    page.on("request", lambda request: asked_for.append(request.url))
    page.wait_for_timeout(3000)
    assert asked_for == []
    with page.expect_request("**/kv_importance/tree?*"):
        page.evaluate(hide, False)


def test_polling_backs_off_from_errors_and_recovers(open_page):
    page = open_page()
    shown(page)
    tries: list[str] = []

    def fail(route: Any) -> None:
        tries.append(route.request.url)
        route.fulfill(status=503, json={"message": "busy"})

    page.route("**/kv_importance/tree?*", fail)
    page.get_by_text("no answer, again in 4 s").wait_for()
    page.get_by_text("no answer, again in 8 s").wait_for()
    assert len(tries) == 2
    assert "busy" in page.locator("#notice").inner_text()
    page.unroute("**/kv_importance/tree?*")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("live, every 2 s").wait_for()
    assert not page.locator("#notice").is_visible()
    assert all("503" in line for line in open_page.problems)
    open_page.problems.clear()


def test_a_round_asks_for_news_only(open_page):
    page = open_page()
    page.wait_for_selector("#events [data-serial]")  # of the first round
    with page.expect_request("**/kv_importance/events?*") as asked_for:
        pass
    assert int(parse_qs(urlsplit(asked_for.value.url).query)["since"][0]) > 0
