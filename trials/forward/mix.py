import re,sys,collections
f,a,b=sys.argv[1],int(sys.argv[2]),int(sys.argv[3])
c=collections.Counter()
for l in open(f).read().splitlines()[a-1:b]:
    m=re.match(r'/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)',l)
    if m: c[m.group(2).split('.')[0] if not m.group(2).startswith('MUFU') else m.group(2)]+=1
print(sum(c.values()),dict(c.most_common()))
