"""Words to make prompts of where no tokenizer is at hand: common, short, one token in most vocabularies.

Not a vocabulary of any model. No units.
"""

from __future__ import annotations

_TEXT = """
the of and to in is you that it he was for on are with as his they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way
about many then them would write like so these her long make thing see him two has look more day could go come did
my sound no most number who over know water than call first people may down side been now find any new work part
take get place made live where after back little only round man year came show every good me give our under name
very through just form much great think say help low line before turn cause same mean move right boy old too does
tell set three want air well also play small end put home read hand port large spell add even land here must big
high such follow act why ask men change went light kind off need house picture try us again animal point mother
world near build self earth father sea wind bird wing shore wave sand
"""
WORDS = tuple(_TEXT.split())
