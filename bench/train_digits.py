"""Data-parallel training on scikit-learn's handwritten digits: NumPy gradients averaged by
all-reduce.

Knows nothing of how all-reduce works: it is what a user's training loop looks like.

    gpuallreduce run -n 4 bench/train_digits.py          # one process per rank
    python bench/train_digits.py --threads 4             # ranks of one process
    python bench/train_digits.py --compare 1 2 4         # the same training on 1, 2 and 4 ranks
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gpuallreduce as gar

Array = np.ndarray[Any, Any]
HIDDEN, CLASSES, LEARNING_RATE = 64, 10, 0.2
GLOBAL_BATCH = 64  # a multiple of every rank count tried, so that all see the same batches


def load_digits(seed: int) -> tuple[Array, Array, Array, Array]:
    """Training images and labels, test images and labels; images scaled to 0..1."""
    from sklearn.datasets import load_digits as load  # type: ignore[import-untyped]

    images, labels = load(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    split = 1400
    return images[:split], labels[:split], images[split:], labels[split:]


@dataclass
class Network:
    """Two dense layers: 64 pixels, ReLU, 10 classes."""

    parameters: list[Array]

    @classmethod
    def random(cls, seed: int) -> Network:
        """The same start on every rank."""
        rng = np.random.default_rng(seed)
        first = rng.standard_normal((64, HIDDEN)) * np.sqrt(2 / 64)
        second = rng.standard_normal((HIDDEN, CLASSES)) * np.sqrt(2 / HIDDEN)
        shapes = [first, np.zeros(HIDDEN), second, np.zeros(CLASSES)]
        return cls([np.asarray(each, np.float32) for each in shapes])

    def scores(self, images: Array) -> tuple[Array, Array]:
        """Hidden activations and class scores."""
        w1, b1, w2, b2 = self.parameters
        hidden = np.maximum(images @ w1 + b1, 0)
        return hidden, hidden @ w2 + b2

    def gradients(self, images: Array, labels: Array) -> list[Array]:
        """Gradients of the mean cross-entropy over these images."""
        hidden, scores = self.scores(images)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = scores / scores.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= np.float32(len(labels))
        back = (error @ self.parameters[2].T) * (hidden > 0)
        found = [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        return [np.ascontiguousarray(each, np.float32) for each in found]

    def step(self, gradients: Sequence[Array]) -> None:
        """One step of gradient descent."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter -= np.float32(LEARNING_RATE) * gradient

    def accuracy(self, images: Array, labels: Array) -> float:
        """Share of images classified rightly."""
        return float((self.scores(images)[1].argmax(axis=1) == labels).mean())

    def digest(self) -> str:
        """Tells any two sets of parameters apart that differ in a bit."""
        return hashlib.sha256(b"".join(each.tobytes() for each in self.parameters)).hexdigest()


@dataclass
class Result:
    """What a training came to."""

    nranks: int
    accuracy: float
    digests: list[str] = field(default_factory=list)
    seconds: float = 0.0
    allreduce_seconds: float = 0.0


def _check_equal(comm: gar.Communicator, networks: list[Network]) -> str:
    """The digest of the parameters, the same on all ranks or it raises."""
    own = [np.frombuffer(bytes.fromhex(each.digest()), np.uint8) for each in networks]
    gathered = comm.all_gather(own if len(own) > 1 else own[0])
    everyone = (gathered[0] if len(own) > 1 else gathered).reshape(comm.nranks, -1)
    if not (everyone == everyone[0]).all():
        raise SystemExit("ranks hold different parameters")
    return str(everyone[0].tobytes().hex())


def train(comm: gar.Communicator, *, epochs: int, seed: int = 1, verbose: bool = False) -> Result:
    """Trains one network per local rank; all stay equal bit for bit, which is checked after every
    epoch.
    """
    images, labels, test_images, test_labels = load_digits(seed)
    networks = [Network.random(seed) for _ in comm.ranks]
    result = Result(comm.nranks, 0.0)
    share = GLOBAL_BATCH // comm.nranks
    start = time.perf_counter()
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))
        for at in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            batch = order[at : at + GLOBAL_BATCH]
            gradients = []
            for rank, network in zip(comm.ranks, networks, strict=True):
                mine = batch[rank * share : (rank + 1) * share]
                gradients.append(network.gradients(images[mine], labels[mine]))
            before = time.perf_counter()
            comm.allreduce_many(gradients if len(networks) > 1 else gradients[0], op="avg")
            result.allreduce_seconds += time.perf_counter() - before
            for network, averaged in zip(networks, gradients, strict=True):
                network.step(averaged)
        result.digests.append(_check_equal(comm, networks))
        if verbose and comm.ranks[0] == 0:
            reached = networks[0].accuracy(test_images, test_labels)
            print(
                f"epoch {epoch + 1}: accuracy {reached:.4f}, all {comm.nranks} ranks equal",
                flush=True,
            )
    result.seconds = time.perf_counter() - start
    result.accuracy = networks[0].accuracy(test_images, test_labels)
    return result


def _report(result: Result) -> None:
    share = 100 * result.allreduce_seconds / result.seconds if result.seconds else 0.0
    print(
        f"{result.nranks} ranks: accuracy {result.accuracy:.4f}, {result.seconds:.2f} s, of which "
        f"all-reduce {result.allreduce_seconds:.2f} s ({share:.0f} %), "
        f"parameters {result.digests[-1][:16]}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the training; see the module."""
    parser = argparse.ArgumentParser(description="Data-parallel training on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, metavar="N", help="N ranks of this process")
    parser.add_argument(
        "--compare", type=int, nargs="+", metavar="N", help="train with each number of ranks"
    )
    arguments = parser.parse_args(argv)
    for count in arguments.compare or ([arguments.threads] if arguments.threads else []):
        if GLOBAL_BATCH % count:
            parser.error(f"{count} ranks do not divide the batch of {GLOBAL_BATCH}")
        with gar.Communicator(["host"] * count) as comm:
            _report(
                train(
                    comm,
                    epochs=arguments.epochs,
                    seed=arguments.seed,
                    verbose=not arguments.compare,
                )
            )
    if not (arguments.compare or arguments.threads):
        with gar.init() as comm:
            result = train(comm, epochs=arguments.epochs, seed=arguments.seed, verbose=True)
            if comm.rank == 0:
                _report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
