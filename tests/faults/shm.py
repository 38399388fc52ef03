"""Faults of csrc/shm: messages between ranks, shared segments, and the creation of groups."""

from faults.fault import fault

HERE = "csrc/shm/"

FAULTS = (
    fault(
        "memory.no_version",
        "csrc/shm/handle.cpp",
        '  in.constant("version", kHandleVersion);',
        "  in.number<uint32_t>();",
        "ranks of different builds take each other's records for their own",
        "shm.handle_test",
    ),
    fault(
        "memory.nonce_first_byte",
        "csrc/shm/handle.cpp",
        "difference | (a[i] ^ b[i])",
        "difference | (a[0] ^ b[0])",
        "one guessed byte opens a group's memory",
        "shm.handle_test",
    ),
    fault(
        "memory.unsealed",
        "csrc/shm/shared_memory.cpp",
        '  if ((seals & F_SEAL_SHRINK) == 0) distrust("its size is not sealed");\n',
        "",
        "a peer may shrink its segment, and this process dies of SIGBUS",
        "shm.shared_memory_test",
    ),
    fault(
        "memory.hello_to_another",
        "csrc/shm/exchange.cpp",
        "equal_constant_time(hello.nonce, mine().nonce) && hello.to == static_cast<uint32_t>(rank_) &&",
        "equal_constant_time(hello.nonce, mine().nonce) &&",
        "a hello that was meant for another rank is answered",
        "shm.bootstrap_intruders_test",
    ),
    fault(
        "memory.blamed_rank",
        "csrc/shm/rendezvous.cpp",
        "static_cast<int>(blames ? outcome.peer : outcome.rank)",
        "static_cast<int>(blames ? outcome.rank : outcome.peer)",
        "a failure of the start names no rank, or the wrong one",
        "shm.bootstrap_failures_test",
    ),
    fault(
        "memory.two_users",
        "csrc/shm/bootstrap.cpp",
        'if (std::string reason = differing(records, &HandleRecord::uid, "run as different users"); !reason.empty())\n'
        "      return reason;",
        "",
        "why users share no memory is not said",
        "shm.bootstrap_test",
    ),
    fault(
        "memory.meeting_slots",
        "csrc/shm/memory_meeting.cpp",
        "  return page(rank).slots[stage & 1];",
        "  return page(rank).slots[0];",
        "a quick rank writes its next card over the one that a slow rank still reads",
        "shm.symmetric_memory_test",
        "collectives/cuda.registration_test",
        "thread:shm.symmetric_memory_test",
        "thread:collectives/cuda.registration_test",
    ),
)
