"""Schemathesis reads a live server's OpenAPI description and sends what it allows and what it forbids, with all its
checks: every answer must be one the description announces, forbidden requests must be refused, keys must be asked for,
and nothing may be 5xx.

Bounded in the suite; ``make fuzz`` sends more.
"""

import subprocess
import sys

import httpx

CONFIG = """
# A request may have the right shape and still be refused: a file that is not an image, a name that is not known.
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "409", "413", "429"]
"""


def test_every_answer_matches_its_description(keyed, tmp_path, fuzz):
    url, keys = keyed
    secret, _ = keys.create("fuzz", "admin")
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    repeat = ["--generation-database", "none"] if fuzz else ["--generation-deterministic"]
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", *repeat]
    command += ["--checks", "all", "--phases", "examples,coverage,fuzzing", "--no-color"]
    command += ["--max-examples", str(fuzz or 6), "--suppress-health-check", "all"]
    command += ["-H", f"Authorization: Bearer {secret}", f"{url}/openapi.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2_000:]
    assert httpx.get(f"{url}/health/ready", timeout=60).json() == {"ready": True}
    keys.revoke(secret)
