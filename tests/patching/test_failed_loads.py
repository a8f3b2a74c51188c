"""Which loads the scheduler may be told of where a failed one cannot be failed."""

from __future__ import annotations

import pytest

from kvpatch.patches.failed_loads import Failures

pytestmark = pytest.mark.patching


def test_what_did_not_fail_is_reported():
    failures = Failures()
    assert failures.sift({"a", "b"}, (), ("a", "b")) == {"a", "b"}


def test_a_failed_load_is_held_back_until_its_request_is_over():
    failures = Failures()
    failures.add("a")
    assert failures.sift({"a", "b"}, (), ("a", "b")) == {"b"}
    assert failures.sift(set(), (), ()) == set()
    assert failures.sift({"c"}, {"a"}, ()) == {"a", "c"}, "its blocks can be freed now"
    assert failures.sift(set(), {"a"}, ()) == set(), "once"


def test_a_request_that_was_given_up_before_its_load_failed():
    failures = Failures()
    assert failures.sift(set(), {"a"}, ("a",)) == set()
    failures.add("a")
    assert failures.sift({"a"}, (), ("a",)) == {"a"}


def test_a_failure_of_one_transfer_of_several_is_kept_until_all_are_done():
    failures = Failures()
    failures.add("a")
    assert failures.sift(set(), (), ("a",)) == set()
    assert failures.sift({"a"}, (), ("a",)) == set()
