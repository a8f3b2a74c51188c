"""A user's mistake is answered with what to change, and a fault of kvpatch's with a report."""

from __future__ import annotations

import ast
import inspect
import pickle
from collections.abc import Iterator

import pytest

from kvpatch.core import errors
from kvpatch.core.errors import Fault, KvpatchError, Mistake

from . import messages, refusals_page

pytestmark = pytest.mark.contract

_BASES = {KvpatchError, Mistake, Fault, errors.FromOutside}
#: They say what has happened: to a server, to a command, to a check that a load goes without.
_NEITHER = {errors.EngineFailed, errors.Interrupted, errors.NoDigest}
_ALL = {
    name: error
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, KvpatchError) and error not in _BASES
}
#: A cure begins with what to do.
_VERBS = {
    *("ask for", "both sides need", "change", "compare", "correct", "disable", "do", "give"),
    *("have", "install", "keep", "leave", "let", "look", "make", "name", "pass", "restart", "run"),
    *("see", "send", "set", "speculate", "start", "uninstall", "use", "wait", "write"),
}  # fmt: skip


def _mistakes() -> set[str]:
    return {name for name, error in _ALL.items() if issubclass(error, Mistake)}


def _forgotten(tree: ast.Module) -> Iterator[int]:
    """Yields the lines that make a mistake into an error without a cure."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in _mistakes():
            continue
        cure = inspect.signature(_ALL[name]).parameters.get("cure")
        is_needed = cure is not None and cure.default is inspect.Parameter.empty
        if is_needed and len(node.args) + len(node.keywords) < 2:
            yield node.lineno


def test_every_error_is_a_users_or_ours() -> None:
    neither = {e for e in _ALL.values() if not issubclass(e, Mistake | Fault)}

    assert neither == _NEITHER
    assert not [e for e in _ALL.values() if issubclass(e, Mistake) and issubclass(e, Fault)]


def test_every_mistake_that_is_raised_has_a_cure() -> None:
    found = [(path, line) for path, tree in messages.modules().items() for line in _forgotten(tree)]

    assert messages.modules() and not found


@pytest.mark.parametrize("text", ["raise ReadRefused('no')", "raise errors.SettingsError('no')"])
def test_a_raise_without_a_cure_is_noticed(text: str) -> None:
    assert list(_forgotten(ast.parse(text))) == [1]


def test_a_cure_is_a_clause_that_begins_with_what_to_do() -> None:
    cures = {refusal.cure for refusal in messages.refusals()} | set(messages.cures().values())

    for cure in cures - {""}:
        assert cure.startswith(tuple(f"{verb} " for verb in _VERBS)), cure
        assert not cure.endswith(".")
        assert "report" not in cure


def test_only_faults_are_to_be_reported() -> None:
    moments = {error: moment for moment in refusals_page.MOMENTS for error in moment.errors}
    reported = {
        refusal.error
        for refusal in messages.refusals()
        if refusal.error in moments
        if "report it" in refusals_page._row(refusal, moments[refusal.error])[1]
    }

    assert "UnreadableGeometry" in reported and not reported & _mistakes()


@pytest.mark.parametrize("name", sorted(_mistakes() - {"NeverFits"}))
def test_a_mistake_comes_whole_out_of_another_process(name: str) -> None:
    error = pickle.loads(pickle.dumps(_ALL[name]("it is not", "use another")))

    assert (type(error), str(error)) == (_ALL[name], "it is not: use another")
    assert (error.reason, error.cure) == ("it is not", "use another")
