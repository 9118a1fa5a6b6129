"""The screenshot docs/watch.png of docs/monitor.md: `python -m tests.watch.screenshot [FILE]`, or `make screenshots`.

It needs Chromium. It shows two ranks of a toy loop: on rank 1, one token's logprob is off by one ulp from some step on,
and later more tokens drift.
"""

import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

from alignkit.drift import Monitor

from . import browser

CONTRACT = "alignkit-6/sm90/v128/k8/kv128/leaf512"
STEPS, FAULTY = 40, 27


def run(directory: Path) -> None:
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        with Monitor(
            directory,
            contract=CONTRACT,
            names="verl",
            rank=rank,
            on_difference=lambda error: None,
            sinks=[],
            keep_worst=3,
        ) as monitor:
            for step in range(STEPS):
                rollout = -4 * torch.rand(16, 128, generator=generator) ** 2
                training, tokens = rollout.clone(), torch.randint(0, 151936, rollout.shape, generator=generator)
                if rank == 1 and step >= FAULTY:
                    training[3, 17] = torch.nextafter(rollout[3, 17], torch.zeros(()))
                    for late in range((step - FAULTY) // 2):
                        training[late, 20:] -= 1e-6 * 2.0**late * torch.rand(108, generator=generator)
                monitor.log(step, rollout, training, tokens=tokens)


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path("drift")  # a relative path, as users write it
        run(scratch / directory)
        with browser.watch(directory, folder=scratch) as (_, url):
            browser.chromium(
                f"--screenshot={scratch}/page.png", "--window-size=1040,1240", "--virtual-time-budget=4000", url=url
            )
        Image.open(f"{scratch}/page.png").convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/watch.png"))
