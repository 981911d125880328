"""Which test guards which promise of decoding: one row a promise, and every name in it is a test that exists."""

import re
from pathlib import Path

import pytest

GUARDS = {
    # A block
    "the anchor and the first blocks are those of the reference": ["test_every_policy_equals_the_reference"],
    "S + 1 forwards a block, S with fused commit": [
        "test_a_block_of_s_passes_costs_s_and_one_forwards_and_s_with_fused_commit",
        "test_a_fused_commit_changes_no_answer_of_an_unshifted_model",
    ],
    # Unmasking policies
    "a pass reveals at least one token, never one twice, and a block ends": [
        "test_every_pass_reveals_a_token_and_none_twice_and_a_block_ends_in_time"
    ],
    "confidence is never divided by temperature": [
        "test_a_low_temperature_makes_no_policy_sure_of_itself",
        "test_confidence_is_the_raw_probability_whatever_the_temperature",
    ],
    "ties go to the lowest id": ["test_ties_go_to_the_lowest_id_and_entropy_is_in_nats"],
    # Verified decoding
    "greedy verified answers are AR answers": [
        "test_greedy_verified_answers_are_the_ar_answers",
        "test_verified_equals_ar_for_any_prompt",
    ],
    "sampled verified answers have the AR distribution": [
        "test_verified_answers_over_a_few_letters_have_the_exact_ar_distribution",
        "test_a_vocabulary_narrowed_by_bias_has_the_exact_distribution_too",
        "test_real_seeds_draw_answers_with_their_exact_chances",
        "test_sampled_verified_answers_have_the_distribution_of_ar_answers",
    ],
    "a cycle costs two forwards, one with lanes": [
        "test_verified_mode_costs_two_forwards_a_cycle_and_one_with_lanes"
    ],
    # Edges
    "prompts of 0, 1 and B-1 modulo the block, and up to the context": [
        "test_prompts_of_every_length_modulo_the_block_equal_the_reference",
        "test_the_context_ends_an_answer_with_length",
    ],
    "max_tokens of 1, B-1, B, B+1 is never rounded": ["test_max_tokens_is_never_rounded_to_blocks"],
    "an end of turn at any place of a block": [
        "test_an_end_of_turn_at_any_place_of_a_block_cuts_there",
        "test_an_end_token_to_the_right_never_ends_the_answer_while_masks_remain_left_of_it",
    ],
    "stop texts inside a token, across tokens and blocks": [
        "test_a_stop_text_across_tokens_and_blocks_cuts_where_the_first_is_complete",
        "test_a_stop_text_inside_one_token_cuts_inside_it",
        "test_a_stop_text_that_only_began_is_part_of_the_answer",
    ],
    "characters of several bytes": [
        "test_characters_of_several_bytes_stream_whole",
        "test_a_character_cut_by_the_limit_shows_as_a_replacement",
    ],
    "mask and control tokens in the prompt": ["test_a_mask_id_in_the_prompt_stays_there"],
    "models that always say MASK, pad or end, or no numbers": [
        "test_a_model_that_always_says_one_thing_answers_as_the_reference_does",
        "test_a_model_that_only_says_the_end_gives_an_empty_answer",
        "test_pad_tokens_show_no_text_and_end_by_length",
        "test_a_model_that_always_predicts_mask_still_never_emits_it",
        "test_logits_that_are_not_finite_fail_the_request_and_not_the_engine",
        "test_a_request_whose_numbers_are_not_finite_fails_alone_and_spoils_no_later_user_of_its_memory",
        "test_passes_of_fixed_shapes_read_no_other_requests_numbers",
    ],
    "sampling settings at their limits": [
        "test_any_request_gives_the_ids_and_logprobs_of_the_reference",
        "test_sampling_from_one_token_is_greedy",
        "test_a_seed_gives_the_same_answer_again_and_another_seed_another",
        "test_logprobs_take_bias_but_no_temperature",
    ],
    "a mix gives the answers of each alone": ["test_a_mix_of_requests_gives_the_answers_that_each_gives_alone"],
    "context overflow": ["test_a_prompt_that_fills_the_context_is_refused_before_any_forward"],
    "a cancelled request is gone with the next pass": [
        "test_a_cancelled_request_is_in_no_later_forward_and_its_memory_serves_the_next",
        "test_leaving_a_stream_frees_its_memory_at_once",
        "test_a_cancelled_request_leaves_no_numbers_that_spoil_the_next_user_of_its_memory",
    ],
    "ids without a token": [
        "test_exactly_the_ids_without_a_token_and_mask_are_never_emitted",
        "test_ids_beyond_the_tokenizer_and_forbidden_ids_are_never_emitted",
    ],
    # Engine
    "one forward serves all": ["test_every_step_is_one_forward_however_many_run"],
    "a prompt costs one forward a chunk": [
        "test_a_prompt_costs_one_forward_a_chunk_however_small_the_block",
        "test_a_long_prompt_is_taken_in_by_chunks_while_others_decode_in_every_step",
    ],
    "a prefix is never another prompt's, nor a stale one": [
        "test_prompts_whose_hashes_collide_share_nothing_from_where_they_differ",
        "test_a_page_that_was_given_away_is_no_prefix_any_more",
        "test_a_prefix_that_two_computed_at_once_is_forgotten_with_the_page_it_is_known_by",
        "test_answers_whose_blocks_see_themselves_are_no_prefix_for_others",
    ],
    "KV memory is bounded, and requests wait for it in order": [
        "test_requests_wait_for_memory_and_start_in_the_order_of_arrival",
        "test_kept_prefixes_give_way_and_memory_stays_bounded_over_many_cancelled_requests",
        "test_a_request_that_can_never_fit_is_refused_and_says_what_to_do",
        "test_a_scored_request_beside_two_that_share_a_prefix_waits_and_all_finish",
        "test_any_mix_of_leases_shares_only_equal_prefixes_and_can_always_finish_in_order",
    ],
    "nobody waits while a later one of its size finishes twice": [
        "test_no_request_waits_while_a_later_one_of_its_size_finishes_twice"
    ],
    # Constrained output
    "a finished answer has the form": [
        "test_an_answer_that_stops_is_valid_under_any_schema",
        "test_a_constrained_answer_equals_the_reference",
        "test_tokens_that_break_the_form_return_to_mask_and_are_chosen_again",
    ],
    "a limit leaves a beginning of the form": [
        "test_a_limit_in_the_middle_of_a_form_leaves_a_beginning_and_says_length"
    ],
    "a form that cannot be followed or compiled fails its request alone": [
        "test_a_constraint_that_does_not_compile_fails_alone_and_frees_its_place",
        "test_a_form_that_no_token_can_go_on_with_fails_its_request_and_nothing_else",
        "test_a_draft_into_a_dead_end_costs_nothing_where_the_ar_path_stays_out",
    ],
    "unknown words and endless compiles are refused": [
        "test_an_unknown_keyword_is_refused_with_its_name_and_place",
        "test_what_cannot_be_compiled_is_refused_in_time",
    ],
}


@pytest.mark.parametrize("promise", GUARDS)
def test_every_promise_has_a_test_that_exists(promise):
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    known = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    assert set(GUARDS[promise]) <= known
