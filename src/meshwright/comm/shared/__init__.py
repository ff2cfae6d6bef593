"""Collectives and messages between the CPU ranks of one host, through memory that all of them map.

        group.py   channel.py          what the rest of the house sees: a Group, a Channel
            │           │
        steps.py    ring.py            what a rank does for a collective, for a message
            │           │
        board.py  signature.py         where members of a group post what they do and how far they are
            └─────┬─────┘
              progress.py              operations under way, and waiting for peers that may be slow or dead
                  │
               host.py                 all ranks of the host and the one segment they share
        segment.py  arena.py  futex.py  process.py

There is no thread and no lock. Every word of the shared memory has one writer; a rank that waits for a peer sleeps on
the word that the peer will write. Nothing has a name in a file system, so nothing is left behind, whoever is killed.
"""
