"""Commands about models: train, evaluate, look at and export one."""
