"""The subcommands of `lockstep`, one module each: `add_parser(subparsers)` and `run(args) -> int`. They are fast to import."""
