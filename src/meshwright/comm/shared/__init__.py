"""Collectives and messages between the CPU ranks of one host, through memory that all of them map.

        group.py              channel.py     what the rest of the house sees: a Group (and its memory, `whole.py`),
            │                     │          and a Channel, whose rings are there too
        member.py                 │          this rank in a group: each collective from its post to its end
            │                     │
        steps.py                  │          what a rank does for each collective
            │                     │
        board.py                  │          where members post what they do (`signature.py`) and how far they are
            └──────────┬──────────┘
                  progress.py                operations under way, and waiting for peers that may be slow or dead
                       │
                    host.py                  all ranks of the host, and the one segment that they share
         segment.py  arena.py  futex.py  process.py  copy.py

There is no thread and no lock. Every word of the shared memory has one writer; a rank that waits for a peer sleeps on
the word that the peer will write. Nothing has a name in a file system, so nothing is left behind, whoever is killed.
"""
