"""The built-in `host` plan: CPU calls with real alternatives, for machines without a GPU."""

from __future__ import annotations

from functools import cache

from initwarm.plan import Plan
from initwarm.planfile import parse_plan

_HOST = """
{"version": 1, "device": "cpu", "calls": [
  {"call": "initwarm.host_matmul", "buckets": {"max": 16}, "args": {
    "a": {"dtype": "float32", "shape": ["M", 256]}, "b": {"dtype": "float32", "shape": [256, 512]}}},
  {"call": "initwarm.host_matmul", "buckets": {"max": 16}, "args": {
    "a": {"dtype": "bfloat16", "shape": ["M", 256]}, "b": {"dtype": "bfloat16", "shape": [256, 256]}}},
  {"call": "initwarm.host_softmax", "buckets": {"max": 16}, "args": {
    "x": {"dtype": "float32", "shape": ["M", 2048]}}}
]}
"""


@cache
def host_plan() -> Plan:
    """The built-in plan."""
    return parse_plan(_HOST, "host")
