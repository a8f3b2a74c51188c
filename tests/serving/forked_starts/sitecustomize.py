"""Python imports this at its start: an engine's process has itself forked, where it can be."""

import os
import sys

#: Its socket (tests/serving/engine_ancestor.py).
_ANCESTOR = "TEST_ENGINE_ANCESTOR"
_API_SERVER = ["-m", "vllm.entrypoints.openai.api_server"]
_SPAWNED = "from multiprocessing.spawn import spawn_main;"

if _ANCESTOR in os.environ:
    # A spawned process is given the flags of its parent. This one is in the environment as well.
    arguments = [argument for argument in sys.orig_argv if argument != "-B"]
    if arguments[1:3] == _API_SERVER or (
        arguments[1:2] == ["-c"] and arguments[2].startswith(_SPAWNED)
    ):
        import handed_over_start

        handed_over_start.hand_over(os.environ[_ANCESTOR], arguments)
