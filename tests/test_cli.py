"""The rawpaged command: usage, errors in one line, plan, generate, serve and its signals."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import rawpaged
from rawpaged import LLM, cli
from rawpaged.cli import _ready_text, byte_size, main, rare_garbage_collection
from rawpaged.config import EngineConfig
from rawpaged.engine import loading
from tests.server.client import complete, send
from tests.tiny import LLAMA, tiny_config, write_tokenizer

ROOT = Path(__file__).parent.parent
COMMANDS = ("serve", "generate", "plan", "profile")
ARGUMENTS = {
    "serve": [LLAMA, "--port", "0"],
    "generate": [LLAMA, "hello"],
    "plan": [LLAMA],
    "profile": [LLAMA],
}
HEAVY = ("numba", "numpy", "aiohttp", "cupy", "tokenizers", "msgspec", "jinja2", "rawpaged.engine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny Llama with a tokenizer beside it."""
    directory = tmp_path_factory.mktemp("model")
    shutil.copytree(LLAMA, directory, dirs_exist_ok=True)
    return str(write_tokenizer(directory))


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -W error -m rawpaged ...`; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "rawpaged", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that fails with status 1."""
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"rawpaged: error: [^\n]+\n", err), err
    return err


def usage_error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights is an error."""
    monkeypatch.delattr(loading, "load_weights")
    monkeypatch.delattr(loading, "dummy_weights")


# Usage


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["--version"])
    assert info.value.code == 0
    assert capsys.readouterr().out == f"rawpaged {rawpaged.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 0
    out = capsys.readouterr().out
    if arguments == ["--help"]:
        assert all(command in out for command in COMMANDS)
    else:
        flags = {"--" + f.name.replace("_", "-") for f in fields(EngineConfig)} - {"--model"}
        assert flags <= set(re.findall(r"--[\w-]+", out))


@pytest.mark.parametrize(
    "code",
    [
        "import rawpaged",
        "from rawpaged import SamplingParams, RequestOutputKind",
        "from rawpaged.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from rawpaged.cli import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass",
        "from rawpaged.cli import main\ntry: main(['plan', '--bogus'])\nexcept SystemExit: pass",
    ],
)
def test_imports_are_light(code: str) -> None:
    code += f"\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["serve"],
        ["generate", LLAMA],
        ["serve", LLAMA, "--bogus"],
        ["serve", LLAMA, "--port", "http"],
        ["serve", LLAMA, "--max-num-seqs", "many"],
        ["serve", LLAMA, "--device", "tpu"],
        ["plan", LLAMA, "--dtype", "float8"],
        ["plan", LLAMA, "--memory", "much"],
        ["plan", LLAMA, "--port", "1"],
        ["generate", LLAMA, "hello", "--log-level", "loud"],
    ],
    ids=str,
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: rawpaged" in usage_error_of(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4000000", 4 * 10**6),
        ("50GB", 50 * 10**9),
        ("50gb", 50 * 10**9),
        ("4GiB", 4 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("3k", 3000),
        ("3kb", 3000),
        ("3KiB", 3072),
        ("2M", 2 * 10**6),
        ("2MiB", 2**21),
        ("1t", 10**12),
        ("1TiB", 2**40),
        (" 7 B ", 7),
        ("1e9", 10**9),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_byte_size(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "0", "0.1", "-5GB", "5XB", "5GBs", "5 G B", "nan", "inf", "1e999", "0x10"]
)
def test_no_byte_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        byte_size(text)


# Flags


def test_every_flag_reaches_the_configuration() -> None:
    values = {
        "model": "m", "tokenizer": "t", "chat_template": "c", "revision": "r", "device": "cpu",
        "dtype": "bfloat16", "kv_cache_dtype": "fp8", "load_format": "dummy", "max_model_len": 11,
        "block_size": 32, "num_gpu_blocks_override": 12, "kv_cache_memory_bytes": 13,
        "max_num_seqs": 14, "max_num_batched_tokens": 15, "max_logprobs": 16, "num_threads": 17,
        "seed": 18, "scheduling_policy": "priority", "watermark": 0.25,
        "preemption_mode": "auto", "swap_space": 0.5,
    }  # fmt: skip
    switches = {"enable_prefix_caching", "enforce_eager", "batch_invariant", "async_scheduling"}
    # Refused on a CPU, see test_memory_plan.py; refused with dummy weights, see below.
    others = {"gpu_memory_utilization", "quantization"}
    assert {*values, *switches, *others} == {field.name for field in fields(EngineConfig)}
    arguments = ["m", "--no-enable-prefix-caching", "--enforce-eager", "--batch-invariant"]
    arguments += ["--no-async-scheduling"]
    for name, value in list(values.items())[1:]:
        arguments += ["--" + name.replace("_", "-"), str(value)]
    for command in COMMANDS:
        rest = ["hello"] if command == "generate" else []
        args = cli._parser().parse_args([command, *arguments, *rest])
        config = cli._engine_config(args)
        expected: dict[str, Any] = {
            **values,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "batch_invariant": True,
            "async_scheduling": False,
        }
        assert config == EngineConfig(**expected)


def test_quantization() -> None:
    args = cli._parser().parse_args(["serve", "m", "--quantization", "gguf"])
    assert cli._engine_config(args) == EngineConfig(model="m", quantization="gguf")


def test_flags_default_to_those_of_the_configuration() -> None:
    for command in COMMANDS:
        args = cli._parser().parse_args([command, *ARGUMENTS[command]])
        assert cli._engine_config(args) == EngineConfig(model=LLAMA)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "513"], "max_position_embeddings=512"),
        (["--max-model-len", "-1"], "max_model_len=-1"),
        (["--max-model-len", "65", "--num-gpu-blocks-override", "4"], "max_model_len=65"),
        (["--block-size", "8"], "block_size=8"),
        (["--num-gpu-blocks-override", "0"], "num_gpu_blocks_override=0"),
        (["--kv-cache-memory-bytes", "1kB"], "kv_cache_memory_bytes=1000"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens=0"),
        (["--max-num-seqs", "1000000000000"], "memory"),
        (["--max-logprobs", "-1"], "max_logprobs=-1"),
        (["--seed", "-1"], "seed=-1"),
    ],
    ids=str,
)
def test_flag_errors_come_before_loading(
    command: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error_of(capsys, command, *ARGUMENTS[command], *flags)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("command", COMMANDS)
def test_model_errors_name_the_file(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rest = ARGUMENTS[command][1:]
    missing = str(tmp_path / "missing")
    assert missing in error_of(capsys, command, missing, *rest)
    assert str(tmp_path) in error_of(capsys, command, str(tmp_path), *rest)
    broken = tmp_path / "config.json"
    broken.write_text("{")
    assert str(broken) in error_of(capsys, command, str(tmp_path), *rest)


@pytest.mark.usefixtures("unloaded")
def test_damaged_weights_name_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert str(weights) in error_of(capsys, "generate", str(tmp_path), "hello")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], "port=99999"),
        (["--port=-1"], "port=-1"),
        (["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--api-key", ""], "API key"),
        (["--api-key", "schlüssel"], "API key"),
        (["--served-model-name", ""], "needs a name"),
        (["--shutdown-timeout", "nan"], "shutdown_timeout"),
        (["--shutdown-timeout=-1"], "shutdown_timeout"),
        (["--stream-delay-ms", "nan"], "stream_delay_ms"),
        (["--stream-delay-ms=-1"], "stream_delay_ms"),
        (["--stream-delay-ms", "1001"], "stream_delay_ms"),
    ],
    ids=str,
)
def test_server_flags_are_checked_before_loading(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error_of(capsys, "serve", LLAMA, *flags)


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_spelled_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A shortened one would stop working when another flag begins like it."""
    with pytest.raises(SystemExit) as exit_:
        main([command, *ARGUMENTS[command], "--block-siz", "16"])
    assert exit_.value.code == 2
    assert "unrecognized arguments: --block-siz" in capsys.readouterr().err


@pytest.mark.usefixtures("unloaded")
def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: " in error_of(capsys, "serve", LLAMA, "--port", str(port))


# Commands


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", LLAMA, "--memory", "1MB", "--mean-len", "100", "--mean-len", "16"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{LLAMA}: LlamaForCausalLM, 0.1M parameters",
        "weights      571.1 kB as float32",
        "workspace    1.573 MB",
        "KV pool      995.3 kB: 81 blocks of 16 = 1296 tokens, 768 bytes a token as float32",
        "requests     2 of max_model_len=512 at once, up to max_num_seqs=64 in a step",
        "             11 of 100 tokens, paged; 2 if each reserved 512",
        "             81 of 16 tokens, paged; 2 if each reserved 512",
    ]


@pytest.mark.usefixtures("unloaded")
def test_plan_needs_no_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((Path(LLAMA) / "config.json").read_text())
    config |= {"num_hidden_layers": 32, "max_position_embeddings": 8192, "dtype": "bfloat16"}
    config |= {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--memory", "50GB", "--mean-len", "1000"]
    assert main(arguments) == 0
    assert "378 of 1000 tokens, paged; 46 if each reserved 8192" in capsys.readouterr().out


def test_plan_with_a_wrong_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA, "--mean-len", "0"]) == 2
    assert "--mean-len=0" in capsys.readouterr().err


def test_generate(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", model, "the café", "--max-tokens", "12", "--num-threads", "1"]
    assert main(arguments) == 0
    with LLM(tiny_config(model=model)) as llm:
        params = rawpaged.SamplingParams(temperature=0.0, max_tokens=12)
        (output,) = llm.generate("the café", params, use_tqdm=False)
    assert capsys.readouterr().out == output.outputs[0].text + "\n"


def test_generate_from_standard_input(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--num-threads", "1", "--temperature", "1", "--seed-request", "3"]
    assert main(["generate", model, "the café", *flags]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("the café"))
    expected = capsys.readouterr().out
    assert main(["generate", model, "-", *flags]) == 0
    assert capsys.readouterr().out == expected
    broken = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8")
    monkeypatch.setattr(sys, "stdin", broken)
    assert "standard input" in error_of(capsys, "generate", model, "-", *flags)


def test_generate_chat(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "hi", "--chat", "--num-threads", "1"]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", model, "user: hi\nassistant: ", "--num-threads", "1"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-tokens", "0"], "max_tokens"),
        (["--temperature", "nan"], "temperature"),
        (["--seed-request", "-9223372036854775809"], "seed"),
    ],
    ids=str,
)
def test_generate_with_wrong_parameters(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error_of(capsys, "generate", LLAMA, "hello", *flags)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve(model: str, number: signal.Signals) -> None:
    """From the ready line, over a request, to a clean end."""
    with process("serve", model, "--port", "0", "--served-model-name", "tiny", "alias") as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("rawpaged: ready, serving tiny at http://127.0.0.1:")
        url = line.split()[5].rstrip(".")
        answer = complete(url, model="alias", prompt="the", max_tokens=3, ignore_eos=True)
        assert answer.json["usage"]["completion_tokens"] == 3
        assert send(url, "GET", "/health").status == 200
        assert send(url, "GET", "/").status == 200
        assert send(url, "GET", "/kv").status == 404
        child.send_signal(number)
        _, err = child.communicate(timeout=5)
        assert child.returncode == 0
        assert "Traceback" not in err
        assert "INFO rawpaged.server.run: told to stop" in err


@pytest.mark.parametrize(("max_model_len", "there"), [(255, False), (256, True)])
def test_what_is_to_be_tried_fits_the_context(max_model_len: int, there: bool) -> None:
    text = _ready_text("http://127.0.0.1:1", "m", False, max_model_len)
    assert ('"max_tokens": 64' in text) == there


def test_the_curl_line_works(model: str) -> None:
    name = """it's a "model\""""
    flags = ["--port", "0", "--api-key", "key", "--served-model-name", name]
    flags.append("--enable-admin-routes")
    with process("serve", model, *flags) as child:
        assert child.stdout is not None
        line = [child.stdout.readline() for _ in range(3)][2]
        program, url, *options = shlex.split(line.replace("YOUR_KEY", "key"))
        assert (program, options[::2]) == ("curl", ["-H", "-H", "-d"])
        headers = dict(header.split(": ") for header in (options[1], options[3]))
        path = url.removeprefix(url[: url.index("/v1")])
        answer = send(url, "POST", path, {**json.loads(options[5]), "max_tokens": 2}, headers)
        assert answer.status == 200
        assert answer.json["model"] == name
        assert send(url, "POST", path, {}, {}).status == 401
        assert send(url, "GET", "/kv", headers=headers).status == 200


def test_interrupted_while_loading(tmp_path: Path) -> None:
    """A model that takes seconds to make up; no traceback, status 130."""
    config = json.loads((Path(LLAMA) / "config.json").read_text())
    config |= {"num_hidden_layers": 200, "hidden_size": 1024, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--load-format", "dummy", "--num-gpu-blocks-override", "32", "--port", "0"]
    with process("serve", str(tmp_path), *flags) as child:
        assert child.stderr is not None
        while "LlamaForCausalLM" not in child.stderr.readline():
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=5)
        assert (child.returncode, out) == (130, "")
        assert "Traceback" not in err
        assert err.endswith("rawpaged: interrupted\n")


def test_the_environment_gives_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, cli.API_KEY_VARIABLE, "secret")
    assert cli._parser().parse_args(["serve", LLAMA]).api_key == "secret"
    assert cli._parser().parse_args(["serve", LLAMA, "--api-key", "other"]).api_key == "other"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "1GB", "--kv-cache-memory-bytes", "2GB"], "memory and kv_cache_memory_bytes"),
        (["--memory", "1GB", "--num-gpu-blocks-override", "5"], "memory and num_gpu_blocks"),
        (["--revision", "v1"], "revision='v1' is for hub ids"),
        (["--mean-len", "999999"], "mean_len=999999 is more than max_model_len=512"),
        (["--num-gpu-blocks-override", "99999999999"], "must be below 2**31"),
    ],
    ids=str,
)
def test_plan_refuses(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", LLAMA, *flags]) == 1
    assert words in capsys.readouterr().err


def test_garbage_collection_is_as_before() -> None:
    before = gc.get_threshold()
    with contextlib.suppress(KeyError), rare_garbage_collection():
        assert gc.get_threshold() != before
        raise KeyError
    assert gc.get_threshold() == before
