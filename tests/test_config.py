"""Configuration: a TOML file, flags that override it, and errors that name the key."""

import dataclasses
from pathlib import Path

import pytest

from mpic.config import SECTIONS, Config, ConfigError, EngineConfig, load_config
from mpic.data.bundled import DEFAULT
from mpic.errors import UnknownPolicy


def write(tmp_path, text):
    path = tmp_path / "mpic.toml"
    path.write_text(text)
    return path


def test_defaults():
    config = load_config()
    assert config == Config()
    assert config.engine.policy == "auto"
    assert config.server.host == "127.0.0.1"
    assert Path(config.engine.model).name == DEFAULT


def test_file_then_flags(tmp_path):
    path = write(tmp_path, '[server]\nport = 9000\n[engine]\npolicy = "reuse"\n[library]\nimage_aspect = 8\n')
    config = load_config(path, {"port": 9001, "policy": None, "data_dir": "/tmp/x"})
    assert config.server.port == 9001
    assert config.engine.policy == "reuse"
    assert config.library.data_dir == "/tmp/x"
    assert config.library.image_aspect == 8.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[server]\nprot = 1\n",
            "unknown key 'prot' in \\[server\\]; known: host, hosts, cors_origins, port",
        ),
        ("[serve]\nport = 1\n", "unknown section \\[serve\\].*known: server, engine, library"),
        ("port = 1\n", "unknown section"),
        ("server = 1\n", "must be a section"),
        ('[server]\nport = "x"\n', "port must be int, not str"),
        ("[server]\nport = true\n", "port must be int, not bool"),
        ("[server]\nport = -1\n", "must not be negative"),
        ("[server]\nmax_body_bytes = 0\n", "max_body_bytes must be at least 1"),
        ("[server]\nmax_body_values = 0\n", "max_body_values must be at least 1"),
        ("[server\n", "cannot read"),
    ],
)
def test_errors_name_the_key(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path, text))


def test_the_default_policy_must_exist(tmp_path):
    with pytest.raises(UnknownPolicy, match="best"):
        load_config(None, {"policy": "best"})


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such"):
        load_config(tmp_path / "none.toml")


def test_flag_names_are_unique_over_sections():
    names = [f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names))


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().model = "x"


def test_a_limit_that_cannot_be_is_an_error_of_its_section(tmp_path):
    for text in ("upload_bytes = 0", "shared_fraction = 1.5", "image_aspect = 0.5", "image_aspect = nan"):
        with pytest.raises(ConfigError, match=f"\\[library\\] {text.split()[0]} must"):
            load_config(write(tmp_path, f"[library]\n{text}\n"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"engine": "vlm"}, "unknown engine 'vlm'; available: native, vllm"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size has no effect with engine = native"),
        ({"cuda_graphs": "yes"}, "unknown cuda_graphs 'yes'; available: auto, on, off"),
        ({"engine": "vllm", "cuda_graphs": "on"}, "cuda_graphs has no effect with engine = vllm"),
        ({"vllm_args": "{}"}, "vllm_args has no effect with engine = native"),
        ({"engine": "vllm", "policy": "cacheblend-15"}, "does not run on the vllm engine: it looks at keys"),
        (
            {"engine": "vllm", "policy": "reuse-2step"},
            r"it takes two steps, and vLLM .*Use another policy, or engine = native",
        ),
        ({"self_test": "never"}, "unknown self_test 'never'; available: when-changed, always"),
        ({"engine": "vllm", "self_test": "always"}, "self_test has no effect with engine = vllm"),
        ({"engine": "vllm", "staging_slots": 4}, "staging_slots has no effect with engine = vllm"),
        (
            {"engine": "vllm", "staging_slot_bytes": 65536},
            "staging_slot_bytes has no effect with engine = vllm",
        ),
        ({"staging_slots": 0}, "staging_slots must be at least 1"),
        (
            {"staging_slot_bytes": 100_000},
            "staging_slot_bytes must be 0 or a power of two from 65536 on, not 100000",
        ),
        ({"staging_slot_bytes": 32768}, "staging_slot_bytes must be 0 or a power of two"),
        ({"engine": "vllm", "pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1"),
    ],
)
def test_an_engine_is_one_of_two_and_takes_its_own_keys(flags, says):
    with pytest.raises(ConfigError, match=says):
        load_config(None, flags)


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize("name", ["step_tokens", "max_running"])
def test_an_engine_that_could_run_nothing_is_refused(engine, name):
    with pytest.raises(
        ConfigError, match=f"{name} must be at least 1", check=lambda error: error.param == name
    ):
        load_config(None, {"engine": engine, name: 0})
    assert getattr(load_config(None, {"engine": engine, name: 1}).engine, name) == 1
