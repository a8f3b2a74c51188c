"""Transfers of vLLM's own with checks of kvpatch's: NIXL, P and the checks are fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kvpatch.observe.catalogue import CheckResult
from kvpatch.transfer.checked_transfer import CheckedTransfer
from kvpatch.transfer.lease import Lease, Lifetime

pytestmark = pytest.mark.patching

HELD, UNPROVEN, EXPIRED = CheckResult.HELD, CheckResult.UNPROVEN, CheckResult.EXPIRED


class Clock:
    """Fake: stands still until it is put on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("checked_transfer", "lease"):
        monkeypatch.setattr(f"kvpatch.transfer.{module}.time", made)
    return made


class _Nixl:
    """Fake: a transfer that is done when it is said to be; it writes down what it is called for."""

    def __init__(self) -> None:
        self.is_done, self.released, self.calls = False, 0, []

    def transfer(self, handle: object) -> str:
        self.calls.append("transfer")
        return "PROC"

    def check_xfer_state(self, handle: object) -> str:
        self.calls.append("poll")
        return "DONE" if self.is_done else "PROC"

    def get_xfer_telemetry(self, handle: object) -> str:
        return "counts"

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.calls.append(f"tell {agent} {notif_msg.decode()}")

    def release_xfer_handle(self, handle: object) -> None:
        self.released += 1


class _Check:
    """Fake: a check with given answers; the last one stands."""

    def __init__(
        self,
        calls: list[str],
        answers: Sequence[CheckResult | Exception | None],
        *,
        proves_hold: bool = False,
        is_due: bool = False,
    ) -> None:
        self.proves_hold, self.is_due = proves_hold, is_due
        self.answers, self.released = list(answers), 0
        self._calls = calls

    def ask(self, nixl: Any, *, has_begun: bool) -> CheckResult | None:
        self._calls.append(
            f"{'hold' if self.proves_hold else 'digest'}{'' if has_begun else ' before'}"
        )
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, nixl: Any) -> None:
        self.released += 1


def refuse(*_: object, **__: object) -> None:
    """In place of a call of NIXL's."""
    raise RuntimeError("not connected")


class Made:
    """A transfer and all that it is made of."""

    def __init__(self, lease: Lease | None = None) -> None:
        self.nixl = _Nixl()
        self.failed: list[str] = []
        fail = partial(self.failed.append, "a")
        self.lifetime = Lifetime(lease or Lease(), "a", "P", fail_check=fail)

    def check(self, *answers: CheckResult | Exception | None, **how: bool) -> _Check:
        made = _Check(self.nixl.calls, answers, **how)
        self.lifetime.checks = (*self.lifetime.checks, made)
        return made

    def hold(self, *answers: CheckResult | Exception | None, is_due: bool = False) -> _Check:
        return self.check(*answers, proves_hold=True, is_due=is_due)

    def begin(self) -> CheckedTransfer:
        read = self.transfer()
        assert read.start() == "PROC"
        return read

    def transfer(self) -> CheckedTransfer:
        return CheckedTransfer(self.nixl, object(), "P", self.lifetime, b"a:1")

    def landed(self) -> CheckedTransfer:
        read = self.begin()
        assert read.state() == "PROC"
        self.nixl.is_done = True
        self.nixl.calls.clear()
        return read


class TestChecks:
    def test_are_asked_in_order_once_it_is_done_and_then_p_is_notified(self) -> None:
        made = Made(Lease(0.0))  # over for long: P's word decides
        hold, digest = made.hold(HELD), made.check(HELD)
        read = made.landed()
        assert read.state() == "DONE"
        assert made.nixl.calls == ["poll", "hold", "digest", "tell P a:1"]
        assert made.lifetime.verdict is HELD
        assert not made.failed
        made.nixl.calls.clear()
        assert read.state() == "DONE", "as <= 0.13 asks again"
        assert not made.nixl.calls
        assert read.telemetry() == "counts"
        read.release()
        assert read.telemetry() == "counts", "as <= 0.13 does"
        assert (hold.released, digest.released, made.nixl.released) == (0, 0, 1)

    @pytest.mark.parametrize("is_over", [False, True])
    def test_that_prove_nothing_leave_it_to_the_lease(self, clock: Clock, is_over: bool) -> None:
        made = Made(Lease(clock.now + 10.0))
        made.hold(None, UNPROVEN)
        digest = made.check(HELD)
        read = made.begin()
        made.nixl.is_done = True
        clock.now += 11.0 if is_over else 9.0
        assert read.state() == "PROC"
        made.nixl.calls.clear()
        clock.now += 3600.0  # it had landed before
        assert read.state() == ("ERR" if is_over else "DONE")
        assert made.nixl.calls == (["hold"] if is_over else ["hold", "digest", "tell P a:1"])
        assert made.lifetime.verdict is (EXPIRED if is_over else None)
        assert made.failed == (["a"] if is_over else [])
        assert digest.released == is_over

    def test_are_not_asked_of_a_transfer_that_broke_off(self, monkeypatch: Any) -> None:
        made = Made(Lease(0.0))
        hold = made.hold(HELD)
        read = made.begin()
        monkeypatch.setattr(made.nixl, "check_xfer_state", lambda handle: "ERR")
        made.nixl.calls.clear()
        assert read.state() == "ERR"
        assert not made.nixl.calls
        assert hold.released == 1
        assert not made.failed, "no check has failed"

    def test_that_raise_fail_it(self, caplog: Any) -> None:
        made = Made()
        hold = made.hold(RuntimeError("not looked for"))
        read = made.landed()
        assert read.state() == read.state() == "ERR"
        assert made.nixl.calls == ["poll", "hold"]
        assert hold.released == 1
        assert "not looked for" in caplog.text
        assert made.lifetime.verdict is None

    @pytest.mark.parametrize(
        ("found", "state"), [(HELD, "DONE"), (UNPROVEN, "DONE"), (CheckResult.WRONG, "ERR")]
    )
    def test_decide_where_p_cannot_be_notified(
        self, monkeypatch: Any, found: CheckResult, state: str
    ) -> None:
        """P's worker is gone, most likely: vLLM's own notification went with the read."""
        made = Made()
        made.hold(found)
        read = made.landed()
        monkeypatch.setattr(made.nixl, "send_notif", refuse)
        assert read.state() == read.state() == state
        assert made.lifetime.verdict is (None if found is UNPROVEN else found)

    def test_that_cannot_ask_a_p_that_is_gone_leave_it_to_the_lease(
        self, clock: Clock, monkeypatch: Any
    ) -> None:
        made = Made(Lease(clock.now))
        made.hold(UNPROVEN)
        read = made.landed()
        clock.now += 1.0
        monkeypatch.setattr(made.nixl, "send_notif", refuse)
        assert read.state() == "ERR"
        assert made.lifetime.verdict is EXPIRED

    @pytest.mark.parametrize("let_go", [CheckedTransfer.release, CheckedTransfer.__del__])
    def test_are_let_go_of_with_it(self, let_go: Callable[[CheckedTransfer], None]) -> None:
        """<= 0.13 vLLM forgets transfers."""
        made = Made()
        hold = made.hold(None)
        read = made.landed()
        assert read.state() == "PROC"
        let_go(read)
        assert hold.released == 1
        made.nixl.calls.clear()
        assert read.state() == "ERR", "whatever has landed since"
        assert not made.nixl.calls

    @pytest.mark.parametrize(("is_read", "is_seen"), [(True, True), (True, False), (False, False)])
    def test_that_nobody_waits_for_let_p_go_once_all_is_read(self, is_read, is_seen):
        """Another rank's transfer has failed the request; P is left alone while it is read."""
        made = Made()
        made.hold(None)
        transfer = made.begin()
        assert transfer.state() == "PROC"
        made.nixl.is_done = is_read
        if is_seen:
            assert transfer.state() == "PROC"

        transfer.release()

        assert (transfer.state(), made.nixl.released) == ("ERR", 1)
        assert made.nixl.calls.count("tell P a:1") == is_read


class TestBeforeAnythingIsRead:
    def test_one_that_answers_at_once_costs_no_step(self) -> None:
        made = Made()
        made.hold(HELD, is_due=True)
        _transfer = made.begin()
        assert made.nixl.calls == ["hold before", "transfer"]

    @pytest.mark.parametrize("is_over", [False, True])
    def test_the_lease_decides_where_a_check_proves_nothing(self, clock, is_over):
        made = Made(Lease(clock.now + (-1.0 if is_over else 1.0)))
        made.hold(UNPROVEN, is_due=True)
        read = made.begin()
        assert ("transfer" in made.nixl.calls) is not is_over
        made.nixl.is_done = True
        assert read.state() == ("ERR" if is_over else "DONE")
        assert made.lifetime.verdict is (EXPIRED if is_over else None)

    def test_a_check_that_raises_fails_it(self) -> None:
        made = Made()
        made.hold(RuntimeError("not looked for"), is_due=True)
        read = made.begin()
        assert read.state() == "ERR"
        assert "transfer" not in made.nixl.calls

    @pytest.mark.parametrize("is_late", [False, True])
    def test_one_that_cannot_be_posted_is_never_done(self, monkeypatch: Any, is_late: bool) -> None:
        """vLLM makes a failed load of the error, and may poll it until it can be released."""
        made = Made()
        made.hold(None if is_late else HELD, HELD, is_due=True)
        monkeypatch.setattr(made.nixl, "transfer", refuse)
        made.nixl.is_done = True
        read = made.transfer()
        if is_late:
            assert read.start() == "PROC"
        else:
            with pytest.raises(RuntimeError, match="not connected"):
                read.start()
        assert read.state() == read.state() == "ERR"
        assert "tell P a:1" not in made.nixl.calls


class TestALease:
    def test_that_ends_before_the_lease_is_done(self, clock: Clock) -> None:
        """However late it is asked for again: a freeze behind that is none of its own."""
        made = Made(Lease(clock.now + 10.0))
        read = made.landed()
        clock.now += 9.9
        assert read.state() == "DONE"
        clock.now += 3600.0
        assert read.state() == "DONE"
        assert made.lifetime.verdict is None
        assert not made.failed
        assert made.nixl.calls == ["poll"], "vLLM notifies P itself"

    def test_that_is_found_done_behind_it_fails_a_check(self, clock: Clock, caplog: Any) -> None:
        made = Made(Lease(clock.now + 10.0))
        read = made.begin()
        clock.now += 12.5
        assert read.state() == "PROC", "whatever is on its way may still land: it is not over"
        made.nixl.is_done = True
        assert read.state() == read.state() == "ERR"
        assert made.failed == ["a"]
        assert made.lifetime.verdict is EXPIRED
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith("request 'a': its read from 'P' was not over 2.5 s after P's lease")
        for _ in range(2):
            read.release()
        assert made.nixl.released == 1

    def test_that_cannot_be_released_is_released_later(self, monkeypatch: Any) -> None:
        """From 0.30 on vLLM keeps blocks that NIXL may still write to, and tries again."""
        made = Made()
        read = made.transfer()
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(made.nixl, "release_xfer_handle", refuse)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="not connected"):
                    read.release()
        read.release()
        assert made.nixl.released == 1
