"""Other papers' systems, one file each, to be read as a diff against grpo_hier.py, which is the first system.

A system is a module with the names in runtime/systems.py: it imports what it keeps, defines what it changes,
and ends in `launch_system`. docs/systems.md says what each name means. """
