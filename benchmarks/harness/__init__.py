"""The harness: which benchmarks exist, and what runs, resumes and writes one. Imports no torch.

A measurement asks its `ResumeCache` for every part that takes long, so that an interrupted run can resume.
"""

from benchmarks.harness.catalog import BENCHMARKS, Benchmark, Results, benchmark_named, sources_digest
from benchmarks.harness.command import run
from benchmarks.harness.deadline import BUILD_TIMEOUT, START_TIMEOUT, exit_after, exit_with_parent
from benchmarks.harness.environment import data_folder, describe_environment, installed_version, require_files
from benchmarks.harness.process_status import status
from benchmarks.harness.resume_cache import ResumeCache
from benchmarks.harness.schedules import fits, schedule_named, title_of

__all__ = [
    "BENCHMARKS",
    "BUILD_TIMEOUT",
    "START_TIMEOUT",
    "Benchmark",
    "Results",
    "ResumeCache",
    "benchmark_named",
    "data_folder",
    "describe_environment",
    "exit_after",
    "exit_with_parent",
    "fits",
    "installed_version",
    "require_files",
    "run",
    "schedule_named",
    "sources_digest",
    "status",
    "title_of",
]
