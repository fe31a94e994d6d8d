"""What a request pays for metrics: ``python benchmark/metrics_publishing.py``.

Serves short requests on the real tree, each with an observation, and times what publishing adds after each:
the whole table, in the multi-process mode of the Prometheus client, as in a server.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "test"))

REQUESTS = 2000
WARM_UP = 100


def main(requests: int = REQUESTS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        import numpy as np

        from sglang_importance.cache.cache_factory import gauge_values
        from sglang_importance.metrics.publisher import MetricsPublisher

        from support.drivers.tree_driver import PAGE, TreeDriver

        driver = TreeDriver(tokens=4096)
        publisher = MetricsPublisher()
        publish, serve = [], []
        for i in range(WARM_UP + requests):
            tokens = list(range(100 * (i % 150), 100 * (i % 150) + 8 * PAGE))
            start = time.perf_counter()
            request = driver.admit(tokens)
            driver.prefill(request, body=np.ones(8))
            driver.decode(request, [7])
            driver.finish(request)
            served = time.perf_counter()
            publisher.publish(driver.component.state.counters, gauge_values(driver.cache))
            publish.append(time.perf_counter() - served)
            serve.append(served - start)
        published = np.array(publish[WARM_UP:]) * 1e6
        print(f"publish: median {np.median(published):.1f} us, p99 {np.quantile(published, 0.99):.1f} us")
        print(f"tree work of the same request: median {np.median(serve[WARM_UP:]) * 1e6:.1f} us")


if __name__ == "__main__":
    typer.run(main)
