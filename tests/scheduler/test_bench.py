"""The benchmark of planning checks what it times and says how long it took."""

from deepinfer.bench.scheduler import run_scheduler


def test_benchmark_reports_every_kind_of_work():
    table = run_scheduler(num_requests=3, num_context=300, num_prompt=1000, num_steps=5)
    for work in (
        "step by step",
        "one step ahead",
        "keys of a prompt of 1000",
        "hit of 768 tokens, keys known",
        "keys included",
        "choose a total",
        "the same, adaptive minus all verified, 3 requests",
        "choose, update and refine together",
    ):
        assert work in table
