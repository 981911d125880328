"""The report in a real Chromium: nothing is wider than the screen, at a desk and on a phone."""

import dataclasses

import pytest
from test_page import LOSSES, build
from test_scores_and_modes import answer
from test_speed import report as speed_report

from ar2diff.evals.page import render_page
from ar2diff.evals.report import EvalReport
from ar2diff.testing.models import byte_tokenizer

pytestmark = pytest.mark.browser
# What reaches beyond the right edge of the screen and is not inside a box that scrolls by itself.
WIDE = """() => [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll") &&
    e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """Everything that is long: a word without a break, forty passes, six modes, absent programs."""
    text = "w" * 300
    modes = [f"diffusion, steps={count}" for count in (1, 2, 4, 8, 16)]
    long = dataclasses.replace(
        answer(modes[0]),
        token_ids=tuple(text.encode()),
        reveal_passes=tuple(place % 40 for place in range(len(text))),
    )
    answers = (*build().answers, long, *(answer(mode) for mode in modes[1:]))
    about = {"roots": {"parent": "a" * 64, "converted": "b" * 64}, "machine": {"processor": "x" * 90}}
    report = EvalReport(answers=answers, bits_per_token={}, about=about)
    path = tmp_path_factory.mktemp("page") / "report.html"
    speed = speed_report().as_json()
    speed["absent"] = {"llama.cpp": "y" * 120}
    path.write_text(render_page(report, byte_tokenizer(), LOSSES, title="t" * 80, speed=speed), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_nothing_is_wider_than_the_screen(browser, page_file, width):
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(page_file.as_uri())
    assert page.evaluate(WIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_every_picture_shows_and_asks_nothing_of_other_machines(browser, page_file):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
    page.on("console", lambda message: said.append(message.text))
    page.goto(page_file.as_uri())
    sizes = page.evaluate("[...document.images].map((image) => image.naturalWidth)")
    assert len(sizes) == 4
    assert min(sizes) > 300
    assert set(asked) <= {"file", "data"}
    assert said == []
    page.close()
