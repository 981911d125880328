"""The report page: every mode beside the AR mode, pictures inside, nothing from outside, text escaped."""

import dataclasses
import re

from test_scores_and_modes import answer

from ar2diff.evals.page import render_page
from ar2diff.evals.report import EvalReport
from ar2diff.testing.models import byte_tokenizer

HOSTILE = "<script>alert(1)</script>"
LOSSES = [{"step": step, "diffusion_loss": 5.0 / step, "ar_loss": 1.0} for step in range(1, 9)]


def build():
    hostile = tuple(HOSTILE.encode())
    answers = (
        dataclasses.replace(answer("ar"), correct=True),
        dataclasses.replace(
            answer("verified"), correct=True, seconds=0.5, drafted_by_offset=(4, 4), accepted_by_offset=(3, 1)
        ),
        dataclasses.replace(
            answer("diffusion, steps=2"),
            token_ids=hostile,
            reveal_passes=tuple(place % 2 for place in range(len(hostile))),
        ),
    )
    return EvalReport(answers=answers, bits_per_token={}, about={"note": HOSTILE})


def test_the_page_shows_every_mode_and_what_it_is_worth():
    page = render_page(build(), byte_tokenizer(), LOSSES, title="a run")
    for mode in ("ar", "verified", "diffusion, steps=2"):
        assert f"<td>{mode}</td>" in page
    assert page.count("data:image/png;base64,") == 3
    assert "<strong>verified</strong>" in page
    assert '<meta name="viewport"' in page


def test_nothing_comes_from_outside_and_all_text_is_escaped():
    page = render_page(build(), byte_tokenizer(), LOSSES, title=HOSTILE)
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert "default-src 'none'" in page


def test_each_token_carries_the_pass_that_revealed_it():
    page = render_page(build(), byte_tokenizer(), [], title="a run")
    shown = re.findall(r'title="pass (\d)">(.*?)</span>', page)
    assert [int(number) for number, _ in shown] == [1 + place % 2 for place in range(len(HOSTILE))]
    assert "".join(text for _, text in shown).replace("&lt;", "<").replace("&gt;", ">") == HOSTILE


def test_a_run_without_verified_answers_or_losses_leaves_their_pictures_out():
    report = dataclasses.replace(build(), answers=build().answers[:1])
    page = render_page(report, byte_tokenizer(), [], title="a run")
    assert page.count("data:image/png;base64,") == 1
    assert "denoised" not in page
