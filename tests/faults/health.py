"""Faults of csrc/health: which ranks are lost, whom errors blame, and what the flight record keeps."""

from faults.fault import fault

HERE = "csrc/health/"

FAULTS = (
    fault(
        "health.any_departure",
        HERE + "group_health.cpp",
        "    if (departed && other == peer) return",
        "    if (departed) return",
        "who leaves after its part fails collectives that do not need it",
        "collectives/cpu.communicator_test:Failure.*",
    ),
    fault(
        "health.abort_relaxed",
        HERE + "group_health.cpp",
        "    protocol::store_release(block.abort_state, kAbortSet);",
        "    protocol::store_relaxed(block.abort_state, kAbortSet);",
        "a peer may read an error's text before it is written",
        "thread:collectives/cpu.communicator_test:*Failure.*:Mismatch.*",
    ),
    fault(
        "health.blames_the_waiting",
        HERE + "group_health.cpp",
        "    if (protocol::load_relaxed(control_[peer]->beat) == beats[peer]) break;\n"
        "    peer = static_cast<int>(next);",
        "    break;",
        "a timeout blames a rank that itself waits for the one that is late",
        "health.group_health_test",
    ),
    fault(
        "health.failed_then_completed",
        "csrc/health/flight/flight_record.cpp",
        "    if (slot.entry.state == FlightState::failed) return;\n",
        "",
        "an operation that failed is recorded as completed",
        "health/flight.flight_record_test",
    ),
    fault(
        "health.engine_limit",
        HERE + "device_watch.cpp",
        "      const bool timed_out = stuck_for > limit;",
        "      const bool timed_out = stuck_for > 1000 * limit;",
        "copy engines that wait for a stopped rank wait a thousand times as long",
        "health.device_watch_test",
        limit_s=60,
    ),
    fault(
        "health.no_abort_of_kernels",
        HERE + "device_watch.cpp",
        "    if (lost) protocol::store_release(status->abort, uint32_t{1});\n",
        "",
        "kernels spin on after a rank is lost",
        "health.device_watch_test",
        limit_s=60,
    ),
    fault(
        "health.json_escape",
        "csrc/util/json_writer.cpp",
        "first < 0x20 || first == 0x7F",
        "first < 0x10",
        "a control character in a message makes the record no JSON",
        "health/flight.flight_record_json_test",
    ),
    fault(
        "health.untold_failures",
        HERE + "failure_log.cpp",
        "  for (const auto& error : untold_) state_->say(*error);\n",
        "",
        "a failure that no thread could tell is never told",
        "health.failure_log_test",
    ),
)
