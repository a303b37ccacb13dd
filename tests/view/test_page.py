"""The page in a real browser: what it shows, what the keyboard does, and what hostile texts do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from lockstep.track.rundir import RunDirectory
from lockstep.view.server import Server
from tests.browser import chromium
from tests.track.runs import FACTS
from tests.view.conftest import CORPUS, write

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = sync_api.expect
expect.set_options(timeout=20_000)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def told() -> list[str]:
    """Dialogs, errors and requests to anywhere else; empty if all is well."""
    return []


def opened(browser: Browser, server: Server, told: list[str], view: str = "", *, wide: int = 1280) -> Page:
    page = browser.new_page(viewport={"width": wide, "height": 900})
    page.set_default_timeout(20_000)
    page.on("dialog", lambda dialog: (told.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("console", lambda message: told.append(message.text))
    page.on("popup", lambda popup: told.append(popup.url))
    page.on(
        "request",
        lambda request: told.append(request.url) if not request.url.startswith((server.address, "data:")) else None,
    )
    page.goto(f"{server.address}#{view}")
    return page


def wait_for(page: Page, late: list[Route], count: int) -> None:
    """Wait until the page has asked for so many things that are held back."""
    for _ in range(200):
        if len(late) >= count:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{len(late)} questions, not {count}")


def test_curves_of_two_runs_lie_over_each_other(
    browser: Browser, serve: Start, run: RunDirectory, hostile: RunDirectory, told: list[str]
) -> None:
    page = opened(browser, serve(run.path, hostile.path), told)
    page.wait_for_selector("figure canvas")
    reward = page.locator("figure", has=page.locator("h3", has_text="Reward")).first
    assert reward.locator(".keys .key").all_inner_texts() == ["mean", "90th percentile"]
    reward.locator(".u-over").hover()
    assert len(reward.locator(".tip .key").all_inner_texts()) >= 2  # a line of each run
    assert any(text.startswith("demo") for text in reward.locator(".tip .key").all_inner_texts())
    page.keyboard.press("/")
    page.keyboard.type("grad/norm")
    expect(page.locator("figure")).to_have_count(1)
    page.get_by_label("About grad/norm").click()
    assert "Healthy" in page.locator(".help").inner_text()
    assert told == []


def test_rollouts_are_filtered_and_read_by_keyboard(
    browser: Browser, serve: Start, run: RunDirectory, told: list[str]
) -> None:
    page = opened(browser, serve(run.path), told, "rollouts")
    page.wait_for_selector("li[role=option]")
    assert page.locator(".summary b").inner_text() == "32 rollouts"
    page.keyboard.press("/")
    page.keyboard.type("ärger")
    expect(page.locator(".summary b")).to_have_text("12 rollouts")
    page.get_by_label("Result").select_option("right")
    expect(page.locator(".summary b")).to_have_text("4 rollouts")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.wait_for_selector("article.reply mark")
    assert page.locator("article.reply mark").inner_text() == "7"  # the answer that was read
    assert "step 4" in page.locator("article .head").inner_text()
    page.keyboard.press("j")
    expect(page.locator("article .head")).to_contain_text("step 3")
    page.keyboard.press("t")
    tokens = page.locator(".token")
    assert tokens.count() == 3
    assert "log-probability -0.500" in (tokens.nth(1).get_attribute("title") or "")
    assert tokens.nth(0).evaluate("e => e.style.background") != tokens.nth(2).evaluate("e => e.style.background")
    page.keyboard.press("g")
    page.wait_for_selector(".cards .card")
    assert page.locator(".card").count() == 2
    assert [text.split("\n")[-1] for text in page.locator(".measure").all_inner_texts()] == ["1", "0.7", "0", "-0.7"]
    page.locator(".card").nth(1).click()
    expect(page.locator("article .head")).to_contain_text("sample 1")
    assert told == []


def test_a_filter_in_the_address_survives_a_reload(
    browser: Browser, serve: Start, run: RunDirectory, told: list[str]
) -> None:
    page = opened(browser, serve(run.path), told, "rollouts?result=unscored&first=2&step=2&row=6")
    page.wait_for_selector("article.reply")
    page.reload()
    page.wait_for_selector("article.reply .note")
    assert page.locator(".summary b").inner_text() == "3 rollouts"
    assert "not scored: timed out" in page.locator("article").inner_text()
    assert told == []


def test_new_steps_appear_while_the_run_trains(
    browser: Browser, serve: Start, run: RunDirectory, told: list[str]
) -> None:
    page = opened(browser, serve(run.path), told, "rollouts")
    expect(page.locator(".summary b")).to_have_text("32 rollouts")
    with RunDirectory.resume(run.path, FACTS) as again:
        write(again, range(5, 7))
        expect(page.locator(".summary b")).to_have_text("48 rollouts")
        expect(page.locator("#runs")).to_contain_text("training 6/30")
        page.keyboard.press("1")
        page.wait_for_selector("figure canvas")
        write(again, range(7, 8))
        expect(page.locator("#runs")).to_contain_text("7/30")
    assert told == []


def test_the_other_views_open(
    browser: Browser, serve: Start, run: RunDirectory, hostile: RunDirectory, told: list[str]
) -> None:
    server = serve(run.path, hostile.path)
    page = opened(browser, server, told)
    first = {
        "scores": "main h2",
        "funnel": ".stage",
        "time": ".phase",
        "prompt?text=a": "textarea",
        "settings?all=1": "td code",
    }
    for view, selector in first.items():
        page.goto(f"{server.address}#{view}")
        page.wait_for_selector(selector)
        if view == "funnel":
            assert "timed out" in page.locator(".funnel-view").inner_text()
    assert told == []


def test_hostile_texts_stay_text(browser: Browser, serve: Start, hostile: RunDirectory, told: list[str]) -> None:
    """Every reply of the corpus as a list entry, as a rollout in each colour, as a group, and in search."""
    page = opened(browser, serve(hostile.path), told, "rollouts?order=oldest")
    page.wait_for_selector("li[role=option]")
    for place in range(0, 3 * len(CORPUS), 3):
        page.keyboard.press("j")
        expect(page.locator("li[aria-selected=true]")).to_have_id(f"rollout-{place}")
        page.wait_for_selector("article.reply")
        for key in "ttttts":
            page.keyboard.press(key)
        page.keyboard.press("j")
        page.keyboard.press("j")
    page.keyboard.press("g")
    page.wait_for_selector(".card")
    for view in ("curves?text=%3C", "funnel", "time", "prompt", "settings?all=1", "scores"):
        page.goto(f"{page.url.split('#')[0]}#{view}")
        page.wait_for_timeout(300)
    assert (
        page.locator(
            "main img, main iframe, main script, main a, main meta, main template, main form:not(.tools)"
        ).count()
        == 0
    )
    assert page.evaluate("document.title").endswith("Lockstep")
    assert told == []


@pytest.mark.parametrize("view", ["curves", "rollouts?step=1&row=0", "prompt", "time", "settings?all=1", "scores"])
def test_nothing_sticks_out_on_a_phone(
    browser: Browser, serve: Start, run: RunDirectory, told: list[str], view: str
) -> None:
    page = opened(browser, serve(run.path), told, view, wide=390)
    page.wait_for_selector("main > *", state="attached")
    page.wait_for_timeout(400)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert told == []


def test_a_server_that_ended_is_said(browser: Browser, serve: Start, run: RunDirectory) -> None:
    server = serve(run.path)
    page = opened(browser, server, [], "rollouts")
    page.wait_for_selector("li[role=option]")
    server.shutdown()
    server.server_close()
    page.route("**/api/*", lambda route: route.abort())
    page.wait_for_selector("#problem:visible")
    assert "has ended" in page.locator("#problem").inner_text()


def test_the_list_follows_the_address(browser: Browser, serve: Start, run: RunDirectory, told: list[str]) -> None:
    page = opened(browser, serve(run.path), told, "rollouts?result=right")
    expect(page.locator(".summary b")).to_have_text("4 rollouts")
    page.goto(f"{page.url.split('#')[0]}#rollouts?result=unscored")
    expect(page.locator(".summary b")).to_have_text("4 rollouts")
    expect(page.locator("li .badge.unscored")).to_have_count(4)
    assert told == []


def test_an_answer_that_comes_late_is_not_shown_in_another_view(
    browser: Browser, serve: Start, run: RunDirectory, told: list[str]
) -> None:
    page = opened(browser, serve(run.path), told, "rollouts")
    page.wait_for_selector("li[role=option]")
    late: list[Route] = []

    def hold(route: Route) -> None:
        late.append(route)

    page.route("**/api/rollout?*", hold)
    page.keyboard.press("j")
    page.keyboard.press("j")
    wait_for(page, late, 2)
    late.pop().continue_()
    expect(page.locator("article .head")).to_contain_text("sample 1")
    late.pop().continue_()  # the first that was asked for is answered last
    page.wait_for_load_state("networkidle")
    expect(page.locator("article .head")).to_contain_text("sample 1")
    page.route("**/api/scores?*", hold)
    for keys, there in (("jg", ".cards"), ("3", "textarea"), ("74", ".funnel-view")):
        for key in keys:
            page.keyboard.press(key)
            page.wait_for_timeout(100)
        expect(page.locator(there)).to_be_visible()
        wait_for(page, late, 1 if keys != "3" else 0)
        while late:
            late.pop().continue_()
        page.wait_for_timeout(300)
        expect(page.locator(there)).to_be_visible()
        expect(page.locator("#problem")).to_be_hidden()
    assert told == []


def test_an_error_stays_until_something_else_is_done_and_a_run_that_is_gone_is_said(
    browser: Browser, serve: Start, run: RunDirectory, hostile: RunDirectory
) -> None:
    page = opened(browser, serve(run.path, hostile.path), [], "settings?run=0&other=9")
    problem = page.locator("#problem")
    expect(problem).to_contain_text("there is no run 9")
    with page.expect_response("**/api/state*"):
        pass
    expect(problem).to_contain_text("there is no run 9")
    page.keyboard.press("4")
    expect(page.locator(".funnel-view")).to_be_visible()
    expect(problem).to_be_hidden()
    shutil.rmtree(run.path)
    expect(problem).to_contain_text("this run directory is gone")
    page.keyboard.press("6")
    expect(problem).to_contain_text("recipe.yaml: cannot be read")
