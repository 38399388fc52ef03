"""A discrete-event model of links, engines and collectives, for 2 to 4,096 ranks; `ark simulate` runs it.

machine.py describes the hardware, network.py shares links among flows, algorithms.py and between_nodes.py model the
collectives, collective.py asks the dispatch tables which one runs, fit.py computes machines from measurements,
validate.py checks them against others, steps.py models whole steps. Times are microseconds, rates GB/s (10^9 bytes).
"""
