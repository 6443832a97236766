"""The command line: arguments of commands, and how results are printed. The work itself is done by the packages below.

How a command is added (``commands/config.py`` is an example):

1. Add a line to ``main.COMMANDS``: name, one line of help, module. The module is imported only if the command is chosen.
2. Write the module, ``compactor/cli/commands/<name>.py``, with one public function that receives the command's parser::

       def add_arguments(parser: Parser) -> None:
           parser.set_command(run_clean, frame.argument("log_dir", type=Path, help="..."))    # or, with subcommands:
           parser.add_subcommand("show", "one line of help", show_settings)

   ``set_command`` adds ``--config`` and ``--output``. At the top of the module only light modules may be imported (errors, model.ids,
   frame, output, the standard library). numpy, boto3, pydantic and modules that need them are imported inside functions, so that
   ``--help`` answers at once. A test imports every command's help and looks for heavy modules.
3. Write the function, ``def run_clean(args: Namespace, out: Output) -> int | None``. It reads the settings with
   ``frame.load_command_settings(args)``, calls *one* function below that does the work, and passes the result to
   ``out.print_result(document, *tables)``: the document is the JSON contract, the tables are for people. Long work is shown with
   ``out.progress``, and remarks go to ``out.note``. It returns an exit code, or None for 0. A command over several partitions returns
   ``errors.gravest_exit_code([...])``.
4. Raise errors (``compactor.errors``) and do not print them: ``main.entry`` prints one line and exits with the error's code.
5. Write a page ``docs/commands/<name>.md``.
"""
