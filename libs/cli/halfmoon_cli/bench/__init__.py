"""Load an OpenAI endpoint by the clock, and report the goodput under latency limits.

Pure modules: `load_plan` and `prompt_writer` (requests and their times), `bench_record` and
`run_summary` (results). Shells: `endpoint_probe`,
`request_sender`, `load_generator`, `bench_report`.
"""
