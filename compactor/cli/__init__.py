"""The command line: arguments of commands, and how results are printed.

How to add a command (``commands/config.py`` is an example):

1. Add a row to ``arguments.COMMANDS``. Neither this module nor ``command_parser`` imports anything heavy (numpy, boto3, pydantic).
2. Write ``commands/<name>.py``, which is imported only if the command is called. Slow imports, and those of extras, stay inside functions.
3. Write the function, ``def function(args: Namespace, out: Output) -> int | None``. It passes a result to ``out.print_result(document,
   *tables)``: the document is the JSON contract. None stands for exit code 0.
4. Raise errors (``compactor.errors``) and do not print them.
5. Write a page ``docs/commands/<name>.md``.
"""
