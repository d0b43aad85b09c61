"""Runs stock clients, as their authors publish them, against a server: ``make clients``.

Each client has its quick starts (``calls.py``, ``calls.mjs``). They run in environments of their own below
``var/clients``, since some cannot be installed beside each other; the server is MPIC as it comes, but for a name of its
model and a chat template with tools. Prints a table in Markdown: the calls, those that were refused, those that failed
in the client, and the share of a manual's tokens that were reused when it stood elsewhere in the prompt. Ends with 1 if
anything was refused or failed, or less than 90 % reused.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from server_helpers import png

from mpic.data.bundled import model_folder
from mpic_lab.demo import running_server

HERE = Path(__file__).parent
ROOT = HERE.parents[1] / "var" / "clients"
ENVIRONMENTS = {
    "agents": {
        "openai": "openai",
        "anthropic": "anthropic",
        "langchain_openai": "langchain-openai",
        "langchain_anthropic": "langchain-anthropic",
        "langgraph": "langgraph",
        "openai_agents": "openai-agents",
        "pydantic_ai": "pydantic-ai-slim[openai,anthropic]",
        "open_webui": "pillow",  # its backend is no package: these are the bodies that it sends
    },
    "llama": {"llama_index": "llama-index-llms-openai-like"},
}
"""Environment -> client -> its package."""
NODE = ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"]
TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{ ' ' + content }}{%- elif content -%}
{%- for part in content -%}{{ ' ' }}{{ '<image>' if part.type == 'image' else part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
<s>{%- for tool in tools or [] -%}{{ '\\n' }}{{ tool | tojson }}{%- endfor -%}
{%- for m in messages -%}
{{- {'system': '', 'user': ' USER:', 'tool': ' USER: <tool_response>'}[m.role] | default(' ASSISTANT:') -}}
{{- text(m.content) }}
{%- for call in m.tool_calls or [] -%}{{ '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor -%}{%- if m.role == 'assistant' -%}</s>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ' ASSISTANT:' }}{%- endif -%}
"""
"""The default model's turns, with tools."""


def model(folder: Path) -> Path:
    """Copy the default model, with a template that prints tools."""
    shutil.copytree(model_folder("large"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.strip())
    return folder


def environment(name: str, packages: list[str]) -> Path:
    """Return the Python of an environment, which is made and filled where it is missing."""
    python = ROOT / name / "bin" / "python"
    if not (ROOT / name / ".complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", ROOT / name], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages, "pillow"], check=True)
        (ROOT / name / ".complete").touch()
    return python


def commands(url: str, picture: Path) -> Iterator[tuple[str, list[str | Path] | None]]:
    """Yield each client with its version, and the command that runs it; None where it cannot be had here."""
    for name, clients in ENVIRONMENTS.items():
        python = environment(name, list(clients.values()))
        [site] = (ROOT / name / "lib").glob("python3*/site-packages")
        versions = {found.name: found.version for found in distributions(path=[str(site)])}
        for client, package in clients.items():
            version = "" if client == "open_webui" else versions[package.partition("[")[0]]
            yield f"{client} {version}".strip(), [python, HERE / "calls.py", client, url]
    if not (shutil.which("node") and shutil.which("npm")):
        yield "vercel_ai (left out: needs node and npm)", None
        return
    folder = ROOT / "node"
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *NODE], cwd=folder, check=True
        )
        (folder / ".complete").touch()
    shutil.copy(HERE / "calls.mjs", folder)
    version = json.loads((folder / "node_modules" / "ai" / "package.json").read_text())["version"]
    yield f"vercel_ai {version}", ["node", folder / "calls.mjs", url, picture]


def main() -> int:
    bad = False
    rows = ["| client | calls | refused | failed | reused |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as temporary:
        (data := Path(temporary) / "data").mkdir()
        (picture := Path(temporary) / "picture.png").write_bytes(png())
        folder = model(Path(temporary) / "large")
        with running_server(data, str(folder), "--model-names", "gpt-4o-mini") as (url, _):
            for client, command in commands(url, picture):
                if command is None or (sys.argv[1:] and client.split()[0] not in sys.argv[1:]):
                    rows += [f"| {client} | | | | |"] if command is None else []
                    continue
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
                wrong = [line for line in lines if line["error"]]
                refused = [line for line in wrong if line["status"] is not None]
                reused = min([1.0] + [line["reused"] for line in lines if line["reused"] is not None])
                for line in wrong:
                    print(
                        f"{client}: {line['call']}: {line['status'] or ''} {line['error']}", file=sys.stderr
                    )
                counts = len(lines), len(refused), len(wrong) - len(refused)
                rows.append(f"| {client} | {' | '.join(map(str, counts))} | {reused:.0%} |")
                bad |= bool(wrong) or reused < 0.9 or run.returncode != 0
    print("\n".join(rows))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
