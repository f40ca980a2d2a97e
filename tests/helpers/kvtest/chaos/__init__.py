"""Chaos: conversations with a cluster of real processes while seeded faults strike it, and what must hold.

`links.py` are the proxies between the processes, `cluster.py` the processes, `faults.py` the seeded faults,
`script.py` what a client says and the oracle answers, `conversation.py` one client and what it must get,
`run.py` the rounds, `planted.py` what a process of a test does wrong on purpose.
"""
