"""What runs on the server of a deployment: enrolment, the run, its log and its status."""
