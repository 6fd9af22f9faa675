"""Ways to reach the ranks of a group: in this process, in processes of this host, as Ray actors."""
