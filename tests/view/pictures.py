"""Pictures of the pages for the docs: python -m tests.view.pictures REPORT.html ADDRESS EPISODES BRANCHES OUT

ADDRESS is what `lockstep view` prints for two runs, EPISODES for a run with episodes, BRANCHES for one whose episodes branch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.browser import chromium

KEYS = {"view_group": "g", "view_episode": "t", "view_rollouts": "t", "view_entropy": "ttt", "view_branches": "t"}
DARK = ("view_episode", "view_entropy")
SIZE = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 1700}


def main(report: str, address: str, episodes: str, branches: str, out: str) -> None:
    views = {
        "view_curves": "curves",
        "view_rollouts": "rollouts?result=right&last=3",
        "view_entropy": "rollouts?order=advantage&last=3",
        "view_prompt": "prompt?count=3&tokens=8&text=Which of these numbers is the largest? 815, 206, 974, 530",
        "view_time": "time",
        "view_group": "rollouts?order=advantage",
        "view_episode": "rollouts?result=right&order=longest",
        "view_branches": "rollouts?order=advantage",
        "view_funnel": "funnel",
        "view_scores": "scores",
        "view_settings": "settings",
    }
    addresses = {"view_episode": episodes, "view_branches": branches}
    with chromium() as browser:
        for name, view in views.items():
            size = TALL if name == "view_branches" else SIZE
            page = browser.new_page(viewport=size, color_scheme="dark" if name in DARK else "light")
            page.set_default_timeout(60_000)
            page.goto(f"{addresses.get(name, address)}#{view}")
            page.wait_for_timeout(4000)
            if view.startswith("rollouts"):
                page.keyboard.press("j")
                page.wait_for_selector("article.reply")
                for key in KEYS.get(name, ""):
                    page.keyboard.press(key)
                page.wait_for_timeout(1500)
            if name == "view_prompt":
                page.click("form button[type=submit]")
                page.wait_for_selector(".replies .token", timeout=300_000)
                page.click(".segments button >> nth=1")
            if name in ("view_settings", "view_scores"):
                page.wait_for_selector("table")
            page.screenshot(path=str(Path(out) / f"{name}.png"))
            page.close()
        for name, wide in (("report", SIZE), ("view_phone", {"width": 390, "height": 800})):
            page = browser.new_page(viewport=wide)
            page.goto(Path(report).resolve().as_uri() if name == "report" else f"{address}#curves")
            page.wait_for_timeout(4000)
            page.screenshot(path=str(Path(out) / f"{name}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
