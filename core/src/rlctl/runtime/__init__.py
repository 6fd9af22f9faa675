"""How the controller reaches the ranks of an engine: one worker group, three transports, one behaviour.

A *worker* is one rank: it owns the engines of the roles that live there. A *worker group* is all ranks of one pool; the
controller calls it and never sees a process, a socket or a Ray actor. Which of those it is, is the transport's business.
"""
