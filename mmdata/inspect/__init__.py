"""What people look at: the report page, the loader's clock, the doctor. Nothing else imports these."""
