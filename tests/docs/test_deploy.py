"""The files for containers: linted, their commands are the Makefile's, and every metric that they ask for is served."""

import fnmatch
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mpic import MPIC
from mpic.config import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FUNCTIONS = {"sum", "rate", "histogram_quantile", "by", "on", "group_left"}
SELECTOR = re.compile(r"\b([a-zA-Z_]\w*)\s*(?:\{([^}]*)\})?")
TARGET_LABELS = {"job", "instance"}
"""Labels that Prometheus adds to everything that it scrapes."""


def rules():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def dashboard():
    return json.loads((DEPLOY / "grafana/mpic.json").read_text())


QUERIES = {name: rule["expr"] for name, rule in rules().items()}
QUERIES |= {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in dashboard()["panels"]
    for target in panel["targets"]
}


@pytest.fixture(scope="module")
def families(url):
    """The metrics of a real server that has answered something."""
    with MPIC(url) as client:
        client.chat.completions.create("hello", max_tokens=1)
        return list(text_string_to_metric_families(client.metrics()))


@pytest.fixture(scope="module")
def samples(families):
    """Return the labels of each sample by its name."""
    found = {"up": [{}]}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.parametrize("name", QUERIES)
def test_every_metric_label_and_value_of_a_query_is_served(name, samples):
    query = QUERIES[name]
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    grouped = {
        label.strip()
        for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query)
        for label in group.split(",")
    }
    bare = re.sub(r"\[[^]]*\]|\b(?:by|on)\s*\([^)]*\)|\bgroup_left\b", " ", query)
    asked = [(metric, given) for metric, given in SELECTOR.findall(bare) if metric not in FUNCTIONS]
    assert asked
    for metric, given in asked:
        assert metric in samples, f"{metric} is not served"
        conditions = re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', given)
        labels = {label for label, _, _ in conditions} | (
            grouped if len({m for m, _ in asked}) == 1 else set()
        )
        assert labels - TARGET_LABELS <= {label for sample in samples[metric] for label in sample}
        for label, relation, value in conditions:
            served = {sample[label] for sample in samples[metric] if label in sample}
            if label not in TARGET_LABELS and (metric, label) != ("mpic_http_responses_total", "status"):
                wanted = value.split("|") if relation == "=~" else [value]
                assert set(wanted) <= served, f"{metric} has no {label} {value}"


def test_the_page_of_metrics_lists_exactly_what_is_served(families):
    page = (ROOT / "docs/monitoring.md").read_text()
    listed = dict(re.findall(r"^\| `(mpic_\w+)` \| (\w+) \|", page, re.MULTILINE))
    served = {family.name: family.type for family in families if not family.name.endswith("_created")}
    assert listed == served


def test_every_alarm_is_explained(families):
    page = (ROOT / "docs/monitoring.md").read_text()
    assert set(re.findall(r"^\| `(MPIC\w+)` \|", page, re.MULTILINE)) == set(rules())
    assert all(rule["labels"]["severity"] and rule["annotations"]["summary"] for rule in rules().values())


def test_prometheus_and_grafana_are_given_what_they_refer_to():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    mounted = {mount.split(":")[1] for mount in services["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{file}" for file in scrape["rule_files"]} <= mounted
    (job,) = scrape["scrape_configs"]
    name, port = job["static_configs"][0]["targets"][0].split(":")
    command = services["mpic"]["command"]
    assert name in services and command[command.index("--hosts") + 1] == name and port == "8000"
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    assert compose["secrets"]["metrics-key"]["file"] == "./metrics-key"
    ignored = subprocess.run(["git", "check-ignore", "-q", "deploy/metrics-key"], cwd=ROOT)
    assert ignored.returncode == 0, "the key would be committed"
    provisioning = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards/mpic.yaml").read_text())["providers"]
    assert f"{provider['options']['path']}/mpic.json" in {
        m.split(":")[1] for m in services["grafana"]["volumes"]
    }


def test_no_service_has_more_rights_than_it_needs_or_a_known_password():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True and all(
            port.startswith("127.0.0.1:") for port in service["ports"]
        )
    password = services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert re.fullmatch(r"\$\{GRAFANA_PASSWORD:\?[^}]+\}", password)  # compose refuses to start without it
    page = (ROOT / "docs/containers.md").read_text()
    assert "GRAFANA_PASSWORD" in page and "keys create prometheus --role metrics" in page


# ---- the image


def instructions():
    """Return (instruction, rest) of the Dockerfile; lines that end in a backslash are joined, comments are left
    out."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint is not None, "make setup-dev installs it"
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_is_clean():
    lines = instructions()
    names = [name for name, _ in lines]
    assert set(names) <= {
        *["FROM", "ARG", "RUN", "COPY", "WORKDIR", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"]
    } | {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    given = dict(rest.split("=", 1) for name, rest in lines if name == "ARG")
    used = set(re.findall(r"\$\{(\w+)\}", " ".join(rest for _, rest in lines)))
    assert used == set(given) and ":" in given["BASE"] and not given["BASE"].endswith(":latest")
    for name, rest in lines:
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))  # so that signals reach the server
        if name == "RUN" and "apt-get install" in rest:
            assert "apt-get update &&" in rest
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt" in rest
        if name == "RUN":
            assert subprocess.run(["bash", "-n"], input=rest, text=True).returncode == 0
    users = [rest for name, rest in lines if name == "USER"]
    assert users == ["10001"] and names.index("USER") < names.index("ENTRYPOINT")
    probe = json.loads(dict(lines)["HEALTHCHECK"].split("CMD", 1)[1])
    compile(probe[-1], "<probe>", "exec")


def test_its_commands_are_those_that_the_makefile_and_the_server_offer():
    lines = instructions()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = " && ".join(rest for name, rest in lines if name == "RUN")
    made = re.findall(r"(?:^|&& )(?:\w+=\S+ )*make (\S+)", shell)
    assert made == ["setup"] and set(made) <= targets
    options = {f"--{key.replace('_', '-')}" for cls in SECTIONS.values() for key in cls.__dataclass_fields__}
    commands = [json.loads(dict(lines)["CMD"])]
    for file in ("compose.yaml", "compose.cuda.yaml"):
        commands.append(yaml.safe_load((DEPLOY / file).read_text())["services"]["mpic"]["command"])
    for command in commands:
        assert command[0] == "serve" and {word for word in command if word.startswith("--")} <= options
    assert json.loads(dict(lines)["ENTRYPOINT"]) == ["/opt/mpic/.venv/bin/mpic"]
    assert dict(lines)["WORKDIR"] == "/opt/mpic"
    given = {name.split("=")[0] for instruction, name in lines if instruction == "ARG"}
    build = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]["mpic"]["build"]["args"]
    page = (ROOT / "docs/containers.md").read_text()
    assert set(build) == given and all(f"{name}={value}" in page for name, value in build.items())


def in_context(path):
    """Return whether .dockerignore leaves a file of the repository to the builder."""
    kept = True
    for rule in (ROOT / ".dockerignore").read_text().split():
        pattern = rule.removeprefix("!")
        if any(
            fnmatch.fnmatch(one, pattern.replace("**/", "*")) for one in (str(path), *map(str, path.parents))
        ):
            kept = rule.startswith("!")
    return kept


def test_the_builder_is_given_all_that_the_setup_reads_and_nothing_private(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(line) for line in listed.splitlines()]
    given = {path for path in files if in_context(path)}
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    folders = set(setup.ROOTS.values()) - {"lab"}  # a server needs nothing of it
    assert {path for path in files if path.parts[0] in folders} <= given
    ran = subprocess.run(
        ["make", "-n", "setup", "VENV=/nowhere"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    words = shlex.split(ran.stdout, comments=True)
    scripts = {word for word in words if word.startswith(("tools/", "locked/"))}
    assert "locked/server.txt" in scripts
    assert {
        Path(name) for name in {"pyproject.toml", "setup.py", "constraints.txt", "Makefile", *scripts}
    } <= given
    assert not any(
        in_context(Path(name))
        for name in (".git/config", ".venv/x", "var/x", "deploy/metrics-key", "tests/x", "data/papers/x")
    )


def test_the_probe_of_the_image_asks_a_route_that_needs_no_key(url):
    assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
    from mpic.server.auth import OPEN

    assert "/health/ready" in OPEN and "/health/ready" in dict(instructions())["HEALTHCHECK"]
