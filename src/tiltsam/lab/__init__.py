"""The lab: experiments built on the library. Imports everything else; nothing else imports it."""
