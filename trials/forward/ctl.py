import re,sys
# prints instructions with control info: stall, yield, write barrier, read barrier, wait mask
lines=open(sys.argv[1]).read().splitlines()
fn=sys.argv[2]
start=[i for i,l in enumerate(lines) if 'Function :' in l and fn in l][0]
out=[];i=start
while i+1<len(lines):
    m=re.match(r'\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);\s+/\* (0x[0-9a-f]{16}) \*/',lines[i])
    if m:
        m2=re.match(r'\s+/\* (0x[0-9a-f]{16}) \*/',lines[i+1])
        hi=int(m2.group(1),16)
        c=(hi>>41)&0x1fffff
        stall=c&15; y=(c>>4)&1; wb=(c>>5)&7; rb=(c>>8)&7; wm=(c>>11)&63
        out.append(f"{m.group(1)} [{wm:06b} W{wb if wb<7 else '-'} R{rb if rb<7 else '-'} {'-' if y else 'Y'} S{stall:2d}] {m.group(2)}")
        i+=2
    else:
        i+=1
        if i>start+3 and i<len(lines) and 'Function :' in lines[i]: break
print('\n'.join(out))
