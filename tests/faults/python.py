"""Faults of ark_torch/distributed, ark_torch/tools and the package itself."""

from faults.fault import fault

FAULTS = (
    fault(
        "python.no_version_check",
        "ark_torch/_support.py",
        "    if minor_of(built_for) != minor_of(torch_version):\n",
        "    if minor_of(built_for) > minor_of(torch_version):\n",
        "an extension for an older PyTorch is loaded, and crashes",
        "tests/packaging/test_import.py",
    ),
    fault(
        "python.global_rank",
        "ark_torch/distributed/group.py",
        "    options.global_rank = members[rank] if len(members) else rank\n",
        "    options.global_rank = rank\n",
        "a subgroup's dump is named after another rank",
        "tests/distributed/test_groups.py -k options",
    ),
    fault(
        "python.detail_is_debug",
        "ark_torch/distributed/group.py",
        "    if dist.get_debug_level() == dist.DebugLevel.DETAIL:\n",
        "    if dist.get_debug_level() == dist.DebugLevel.OFF:\n",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL compares nothing",
        "tests/distributed/test_group_control.py -k debug",
    ),
    fault(
        "python.unwritten_dump",
        "ark_torch/distributed/flight.py",
        "    if not _C._flight_record_dump(os.fspath(path)):\n",
        "    if _C._flight_record_dump(os.fspath(path)) is None:\n",
        "a flight record that could not be written is no error",
        "tests/distributed/test_flight_record.py -k demanded",
    ),
    fault(
        "tools.majority",
        "ark_torch/tools/flight_analysis.py",
        "        usual = Counter(signatures.values()).most_common(1)[0][0]",
        "        usual = Counter(signatures.values()).most_common()[-1][0]",
        "of ranks that disagree the majority is blamed",
        "tests/tools/test_flight.py",
    ),
    fault(
        "tools.late_calls",
        "ark_torch/tools/flight_analysis.py",
        "        return operation.time_created_ns > failed_at and rank in self.blamed(operation.group)",
        "        return False",
        "a rank that came too late is not named",
        "tests/tools/test_flight.py",
    ),
    fault(
        "tools.clock_of_machines",
        "ark_torch/tools/_trace_files.py",
        '- first["realtime_ns"] + first["monotonic_ns"]) / 1e3',
        '- first["realtime_ns"] - first["monotonic_ns"]) / 1e3',
        "timelines of two machines do not lie side by side",
        "tests/compile/test_trace.py -k clock",
    ),
    fault(
        "tools.wrong_results",
        "ark_torch/tools/bench/table.py",
        '    if next(iter(row["timings"].values()))["wrong"]:\n        return "WRONG"\n',
        "",
        "a goal is met by wrong results",
        "tests/tools/test_bench.py",
    ),
    fault(
        "tools.explain_exit",
        "ark_torch/tools/explain.py",
        "    return 1 if report.fallbacks or any(",
        "    return 1 if report.fallbacks and any(",
        "explain ends with 0 where something falls back",
        "tests/tools/test_explain.py",
    ),
)
