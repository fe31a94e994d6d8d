"""The live page in a real Chromium, on a real server: what its buttons do, and the key that it asks for."""

from __future__ import annotations

import httpx
import pytest

from support.live_page import API_KEY, choose, confirm, reused_leaf, shown
from support.servers import ServerProcess

pytestmark = pytest.mark.server


# ---- what it does ----


def test_pin_and_unpin_ask_first_and_act(open_page, asked: ServerProcess):
    leaf = reused_leaf(asked)
    page = open_page()
    choose(page, leaf["id"])
    page.get_by_role("button", name="Pin", exact=True).click()
    confirm(page, "Cancel")
    assert asked.get("/kv_importance/pins")["pins"] == []
    page.get_by_role("button", name="Pin", exact=True).click()
    page.locator("#confirm-ttl").select_option("3600")
    confirm(page, "Pin")
    page.get_by_role("button", name="Unpin").wait_for()
    (pin,) = asked.get("/kv_importance/pins")["pins"]
    assert pin["tokens"] == leaf["depth_tokens"] + leaf["tokens"]
    assert 3500 < pin["expires_in_seconds"] <= 3600
    page.wait_for_selector(f'#chart .pinned[data-key="{leaf["id"]}"]')
    page.get_by_role("button", name="Unpin").click()
    confirm(page, "Unpin")
    page.wait_for_selector("#node .pins", state="detached")
    page.wait_for_selector("#timeline circle.unpin")
    moves = page.locator("#events .pin, #events .unpin").all_inner_texts()
    name = f"pin {pin['pin_id'][:12]}"
    assert f"{name} ended · {pin['tokens']} tokens\nthe operator unpinned it" in moves[0]
    assert f"{name} taken in · {pin['tokens']} tokens\nthe operator asked for it" in moves[1]
    assert asked.get("/kv_importance/pins")["pins"] == []


def test_pre_warm_acts_and_says_how_it_went(open_page, asked: ServerProcess):
    leaf = reused_leaf(asked)
    page = open_page()
    choose(page, leaf["id"])
    before = len(asked.get("/kv_importance/prewarm")["jobs"])
    page.get_by_role("button", name="Pre-warm").click()
    confirm(page, "Pre-warm")
    page.get_by_text("Pre-warm done").wait_for()
    jobs = asked.get("/kv_importance/prewarm")["jobs"]
    assert len(jobs) == before + 1
    tokens = leaf["depth_tokens"] + leaf["tokens"]
    assert (jobs[-1]["state"], jobs[-1]["total_tokens"]) == ("done", tokens)


def test_what_the_server_refuses_is_said(open_page, asked: ServerProcess):
    page = open_page()
    choose(page, reused_leaf(asked)["id"])
    refusal = {"status": 400, "json": {"message": "there is no room for one more pin"}}
    page.route("**/kv_importance/pin", lambda route: route.fulfill(**refusal))
    page.get_by_role("button", name="Pin", exact=True).click()
    confirm(page, "Pin")
    page.locator("#notice").get_by_text("there is no room for one more pin").wait_for()
    assert "400" in open_page.problems.pop()


# ---- the key ----


def test_the_page_asks_for_the_key_once_and_keeps_it_out_of_urls(open_page, asked: ServerProcess):
    assert httpx.get(f"{asked.base_url}/kv_importance/tree", trust_env=False).status_code == 401
    page = open_page(key=None)
    page.locator("#key").wait_for()
    page.locator("#key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The server refused this key").wait_for()
    page.locator("#key").fill(API_KEY)
    page.keyboard.press("Enter")
    shown(page)
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    page.reload()
    shown(page)
    assert not page.locator("#key-dialog").is_visible()
    unauthorised = [line for line in open_page.problems if "401" in line]
    assert len(unauthorised) == 2
    open_page.problems.clear()


def test_a_key_that_no_header_carries_is_not_taken(open_page, asked: ServerProcess):
    page = open_page(key=None)
    page.locator("#key").wait_for()
    for wrong in ("clé", "ключ"):
        page.locator("#key").fill(wrong)
        page.keyboard.press("Enter")
        assert page.locator("#key-dialog").is_visible()
        mismatch = "document.getElementById('key').validity.patternMismatch"
        assert page.evaluate(f"[{mismatch}, sessionStorage.length]") == [True, 0]
    page.locator("#key").fill(API_KEY)
    page.keyboard.press("Enter")
    shown(page)
    open_page.problems[:] = [problem for problem in open_page.problems if "401" not in problem]


@pytest.mark.parametrize("path", ["", "/main.js", "/page.css", "/icon.svg"])
def test_the_files_of_the_page_need_no_key(asked: ServerProcess, path: str):
    answer = httpx.get(f"{asked.base_url}/kv_importance/ui{path}", trust_env=False)
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/../ui.py", "/..%2fcontrol.py", "/gone.js", "x", "/index.html"])
def test_nothing_else_is_served_without_the_key(asked: ServerProcess, path: str):
    answer = httpx.get(f"{asked.base_url}/kv_importance/ui{path}", trust_env=False)
    assert answer.status_code == 401
