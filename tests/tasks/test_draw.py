"""Claims about the draws that decide generated problems."""

from collections import Counter

from ar2diff.tasks.draw import Draw
from ar2diff.tasks.problem import no_templates


def test_equal_keys_give_equal_choices_and_other_keys_others():
    def sequence(*key):
        draw = Draw(*key)
        return [draw.integer(0, 10**9) for _ in range(200)]

    assert sequence("a", 1) == sequence("a", 1)
    assert sequence("a", 1) != sequence("a", 2)


def test_integers_cover_the_range_evenly_ends_included():
    draw = Draw("even")
    counts = Counter(draw.integer(3, 7) for _ in range(5000))
    assert set(counts) == {3, 4, 5, 6, 7}
    assert min(counts.values()) > 850


def test_a_sample_has_different_places_in_any_order():
    draw = Draw("sample")
    samples = {tuple(draw.sample("abc", 3)) for _ in range(200)}
    assert len(samples) == 6
    assert all(sorted(sample) == ["a", "b", "c"] for sample in samples)


def test_a_chance_of_all_or_nothing_is_certain():
    draw = Draw("chance")
    assert all(draw.chance(100) for _ in range(300))
    assert not any(draw.chance(0) for _ in range(300))


def test_a_written_task_has_no_templates():
    assert no_templates() == ()
