"""Runs a piece of Python once per rank in real processes, and brings back what each rank found.

Knows nothing of what is tested.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

PROLOGUE = """
import json, os, sys, time
import numpy as np
import gpuallreduce as gar
def report(value):
    print("REPORT " + json.dumps(value), flush=True)
def error_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None
"""


@dataclass
class Rank:
    """What one rank did: its exit status, reports and standard error."""

    status: int
    reports: list[Any]
    stderr: str


def start_job(nranks: int, body: str, **environ: str) -> list[subprocess.Popen[str]]:
    """Starts one process per rank that runs ``body`` after a prologue with ``report`` and
    ``error_of``.
    """
    address = f"unix:test-{secrets.token_hex(8)}"
    processes = []
    for rank in range(nranks):
        variables = {
            **os.environ,
            "GPUALLREDUCE_RANK": str(rank),
            "GPUALLREDUCE_NRANKS": str(nranks),
            "GPUALLREDUCE_LOCAL_RANK": str(rank),
            "GPUALLREDUCE_ADDRESS": address,
            "GPUALLREDUCE_SECRET": "test",
            **environ,
        }
        command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(body)]
        pipe = subprocess.PIPE
        # Not in the checkout: what is installed is what is tested.
        processes.append(
            subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True, cwd="/")
        )
    return processes


def finish_job(processes: list[subprocess.Popen[str]], timeout: float = 60) -> list[Rank]:
    """Waits for all ranks; a job that does not end is killed and fails the test."""
    ranks = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            reports = [
                json.loads(line.removeprefix("REPORT "))
                for line in out.splitlines()
                if line.startswith("REPORT ")
            ]
            ranks.append(Rank(process.returncode, reports, err))
    finally:
        for process in processes:
            process.kill()
    return ranks


def run_job(nranks: int, body: str, *, timeout: float = 60, **environ: str) -> list[Rank]:
    """Runs a job that must succeed on every rank."""
    ranks = finish_job(start_job(nranks, body, **environ), timeout)
    for number, rank in enumerate(ranks):
        assert rank.status == 0, f"rank {number} ended with {rank.status}:\n{rank.stderr}"
    return ranks
