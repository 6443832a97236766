"""The command line: arguments of commands, and how results are printed. The work itself is done by the packages below.

How a command is added (``commands/config.py`` is an example):

1. Add a row to ``arguments.COMMANDS``: name, one line of help, function, arguments, subcommands. ``shared_arguments`` has those of several.
   ``--config`` and ``--output`` are added to all. Both modules import nothing heavy (numpy, boto3, pydantic), so that ``--help`` answers
   at once; a test looks for it.
2. Write the module, ``compactor/cli/commands/<name>.py``. It is imported only if the command is called, and imports what it needs at its
   top. Imports stay inside a function where most calls do without something slow or with an extra that may be missing.
3. Write the function, ``def run_offline_cleaning(args: Namespace, out: Output) -> int | None``. It reads the settings with
   ``command_parser.load_command_settings(args)``, calls *one* function below that does the work, and passes the result to
   ``out.print_result(document, *tables)``: the document is the JSON contract, the tables are for people. Long work is shown with
   ``out.progress``, and remarks go to ``out.note``. It returns an exit code, or None for 0. A command over several partitions returns
   ``errors.gravest_exit_code([...])``.
4. Raise errors (``compactor.errors``) and do not print them: ``main.entry`` prints one line and exits with the error's code.
5. Write a page ``docs/commands/<name>.md``.
"""
