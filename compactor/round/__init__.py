"""One round over one partition: gather facts, plan, then index (pass 1) and rewrite (pass 2) as the driver asks for it."""
