"""Real engines P and D of one release, kvpatch off and on: tokens, time to the first.

Each engine is a process with vLLM's LLMEngine in it; the model is small and random. On CUDA the
engine is the release's Python with Triton's attention and stand_ins/kernels.py for compiled
kernels: its times say what a load adds, and not how fast vLLM is. On the CPU, and in an environment
that has one, it is the vLLM that is installed.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from experiments.engines.models import make_wide_llama
from experiments.gpu.rows import Rows, options_of
from kvpatch.tools.verify.model import make_tiny_llama

_PAIRS = ((64, 64), (128, 32), (32, 128))
_ANSWER = 12
#: Has the kit's stand_ins/missing_packages.py stand in for compiled kernels too.
_KERNELS = "KVPATCH_GPU_STAND_INS"
_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
_START_SECONDS, _ANSWER_SECONDS = 200.0, 60.0


@dataclass(frozen=True)
class Kind:
    """An engine: its name, tokens of a block, whether kvpatch is on."""

    name: str
    block_tokens: int
    kvpatch: bool
    device: str
    model: str
    most_tokens: int
    port: int
    tree: str
    folder: str


class Engine:
    """In the engine's own process."""

    def __init__(self, kind: Kind) -> None:
        is_gpu = kind.device == "cuda"
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kind.port),
            "MASTER_PORT": str(kind.port + 1),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if kind.kvpatch:
            os.environ["ENABLE_KVPATCH"] = "true"
            importlib.import_module("kvpatch.auto")
        if kind.tree:
            sys.path.insert(0, kind.tree)
            # vLLM looks at a model in a process of its own.
            os.environ |= {_KERNELS: "1", "PYTHONPATH": f"{kind.tree}:{os.environ['PYTHONPATH']}"}
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        wanted: dict[str, Any] = {
            "model": kind.model,
            "tokenizer": kind.model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16" if is_gpu else "float32",
            "max_model_len": kind.most_tokens,
            "max_num_batched_tokens": kind.most_tokens,
            "max_num_seqs": 8,
            "block_size": kind.block_tokens,
            "enable_prefix_caching": False,
            "num_gpu_blocks_override": 4 * kind.most_tokens // kind.block_tokens,
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": kind.device,
                "engine_id": kind.name,
            },
        }
        if is_gpu:
            wanted |= {
                "gpu_memory_utilization": 0.12,
                # Other engines start beside it: what memory they take must not be measured.
                "kv_cache_memory_bytes": 4 << 30,
                "attention_backend": "TRITON_ATTN",
                "compilation_config": {"custom_ops": ["none"]},
            }
        names = inspect.signature(EngineArgs).parameters
        arguments = EngineArgs(**{name: value for name, value in wanted.items() if name in names})
        self._engine = LLMEngine.from_engine_args(arguments)
        self._number = 0

    def run(
        self, tokens: list[int], count: int, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Serves one request alone; returns its tokens, milliseconds and transfer parameters."""
        from vllm import SamplingParams

        self._number += 1
        name = f"request-{self._number}"
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        began, first = time.perf_counter(), 0.0
        while (now := time.perf_counter()) < began + _ANSWER_SECONDS:
            mine = [one for one in self._engine.step() if one.request_id.startswith(name)]
            if mine and not first:
                first = time.perf_counter() - began
            if mine and mine[0].finished:
                answer = mine[0].outputs[0]
                return {
                    "tokens": list(answer.token_ids),
                    "first_ms": 1e3 * first,
                    "params": getattr(mine[0], "kv_transfer_params", None),
                }
        self._engine.abort_request([name])
        return {"tokens": None, "first_ms": 1e3 * (now - began), "params": None}

    def idle(self, seconds: float) -> None:
        """Steps without a request, in which P hears that its blocks were read."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._engine.step()
            time.sleep(0.005)


def _process(connection: Connection, kind: Kind) -> None:
    log = os.open(Path(kind.folder, f"{kind.name}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        engine = Engine(kind)
        connection.send(("", None))
        while message := connection.recv():
            name, *arguments = message
            connection.send(("", getattr(engine, name)(*arguments)))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
        traceback.print_exc()
        connection.send((f"{type(error).__name__}: {str(error)[:500]}", None))
    os._exit(0)


class Remote:
    """An engine, seen from here."""

    def __init__(self, kind: Kind) -> None:
        context = multiprocessing.get_context("spawn")
        self.kind = kind
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_process, args=(theirs, kind), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """Returns what it answers.

        Raises:
            RuntimeError: an error, or nothing.
        """
        try:
            if not self._connection.poll(seconds):
                raise RuntimeError(f"{self.kind.name} said nothing for {seconds:g} s")
            error, found = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.kind.name} has ended") from None
        if error:
            raise RuntimeError(f"{self.kind.name}: {error}")
        return found

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the engine's."""
        self._connection.send((name, *arguments))
        return self.answer(2 * _ANSWER_SECONDS)


def _play(rows: Rows, prefill: Remote, decode: Remote, lengths: list[int]) -> None:
    """Hands prompts from P to D. No pair of unlike blocks is stock's to serve."""
    blocks, is_on = (prefill.kind.block_tokens, decode.kind.block_tokens), decode.kind.kvpatch
    is_like = blocks[0] == blocks[1]
    name = f"{blocks[0]} to {blocks[1]}, {'kvpatch' if is_on else 'stock'}"
    for turn, length in enumerate([lengths[0], *lengths]):  # the first one shakes hands
        draw = random.Random(length * 10 + turn)
        prompt = [draw.randrange(2, 250) for _ in range(length)]
        try:
            alone = prefill.call("run", prompt, _ANSWER, None)
            handed = prefill.call("run", prompt, 1, _PREFILL)
            found = decode.call("run", prompt, _ANSWER, handed["params"])
            prefill.call("idle", 0.2)
        except RuntimeError as error:
            rows.add(name, tokens=length, error=str(error)[:700])
            return
        is_same = found["tokens"] == alone["tokens"]
        judged = {"is_right": is_same} if is_on or is_like else {}
        if is_same:
            judged |= {"first_ms": found["first_ms"], "computed_ms": alone["first_ms"]}
        answer = "identical" if is_same else "other tokens" if found["tokens"] else "no tokens"
        rows.add(name, tokens=length, answer=answer, has_shaken_hands=turn > 0, **judged)


def main() -> None:
    """Writes a row for each pair and length of a prompt, off and on."""
    options = options_of(__doc__, release="0.33.0")
    is_gpu = options.device == "cuda"
    rows = Rows(options.json)
    lengths = [17, 333, 1000, 4000] if is_gpu else [17, 333]
    pairs = _PAIRS if is_gpu else _PAIRS[1:2]
    with tempfile.TemporaryDirectory(prefix="kvpatch-gpu-") as folder:
        make = make_wide_llama if is_gpu else make_tiny_llama
        model = str(make(Path(folder, "model")))
        # An environment of the user's own has a vLLM of its own, with its kernels.
        is_kit = is_gpu and "missing_packages" in sys.modules
        tree = str(Path(os.environ["KVPATCH_TEST_CACHE"], options.release)) if is_kit else ""
        logs = str(options.json.parent)
        engines: dict[tuple[str, int, bool], Remote] = {}
        wanted = dict.fromkeys(
            one for p, d in pairs for one in (("P", p, False), ("D", d, False), ("D", d, True))
        )
        port = random.randrange(21000, 29000)
        for number, (side, block, is_on) in enumerate(wanted):
            name = f"{side}{block}{'-kvpatch' if is_on else ''}"
            at = port + 7 * number
            kind = Kind(
                name, block, is_on, options.device, model, max(lengths) + 256, at, tree, logs
            )
            engines[side, block, is_on] = started = Remote(kind)
            if not is_gpu:  # one after the other on two cores
                _await(rows, started)
        for one in engines.values() if is_gpu else ():
            _await(rows, one)
        for p, d in pairs:
            for is_on in (False, True):
                _play(rows, engines["P", p, False], engines["D", d, is_on], lengths)
        for one in engines.values():
            one.process.kill()


def _await(rows: Rows, engine: Remote) -> None:
    try:
        engine.answer(_START_SECONDS)
    except RuntimeError as error:
        rows.add(f"start of {engine.kind.name}", error=str(error))


if __name__ == "__main__":
    main()
