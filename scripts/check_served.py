"""Serves one question where only wheels are installed, beside a sglang: no checkout.

Run by scripts/versions.sh with the Python of an environment; prints one line for each thing that works.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sgl_importance
from sgl_importance.embedded_model import checkpoint_path

QUESTION = "Alice copper. Bruno lantern. David marble. Edith ladder. Question: Bruno"
START_SECONDS = 600.0  # numba compiles what a new environment has never run
LOG = Path("server.log")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def asked(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of an answer; a body makes it a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=30).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert server.poll() is None, f"the server ended:\n{LOG.read_text()[-4000:]}"
            assert time.monotonic() < limit, f"the server does not answer:\n{LOG.read_text()[-4000:]}"
            time.sleep(1)


def check_doctor() -> None:
    done = subprocess.run([PROGRAM, "doctor", "--json"], capture_output=True, text=True, check=False)
    problems = [each for each in json.loads(done.stdout) if each["status"] == "problem"]
    assert not problems, problems
    print("    doctor has no problem")


def check_server() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--kv-policy", "importance", "--page-size", "16", "--max-total-tokens", "4096"]
    flags += ["--model-path", str(checkpoint_path()), "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--attention-backend", "torch_native", "--dtype", "float32"]
    with LOG.open("wb") as log:
        command = [sys.executable, "-P", "-m", "sglang.launch_server", *flags]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(url, server)
            message = {"role": "user", "content": QUESTION}
            body = {"model": "default", "max_tokens": 4, "messages": [message]}
            for _ in range(2):
                answer = asked(f"{url}/v1/chat/completions", body)
                assert answer["choices"][0]["message"]["content"].strip() == "lantern", answer
            first, second = asked(f"{url}/kv_importance/why?limit=2")["requests"][-2:]
            assert sorted(sum(each["missed_tokens"].values()) for each in (first, second))[0] < 16
            print("    a server answers twice, the second time from its cache, and says what missed")
        finally:
            server.terminate()
            server.wait(60)


PROGRAM = Path(sys.executable).with_name("sgl-importance")
assert Path(sgl_importance.__path__[0]).is_relative_to(sys.prefix), "a checkout stands in for the wheel"
print(f"    sgl-importance {version('sgl-importance')} beside sglang {version('sglang')}")
check_doctor()
check_server()
