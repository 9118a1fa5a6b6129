import re,sys
def load(path, want=None):
    """list of (addr, text, stall, yld, wr, rd, wait, reuse)"""
    out=[];cur=None;on=want is None
    lines=open(path).read().split('\n')
    i=0
    while i<len(lines):
        l=lines[i]
        m=re.search(r'Function : (\S+)',l)
        if m: on = want is None or want in m.group(1); out=[] if on and not out else out
        m=re.match(r'\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*/\* 0x([0-9a-f]{16}) \*/',l)
        if m and on:
            m2=re.match(r'\s+/\* 0x([0-9a-f]{16}) \*/',lines[i+1])
            w=int(m2.group(1),16)
            c=w>>41
            stall=c&15; yld=(c>>4)&1; wr=(c>>5)&7; rd=(c>>8)&7; wait=(c>>11)&63; reuse=(c>>17)&15
            out.append((int(m.group(1),16),m.group(2),stall,yld,wr,rd,wait,reuse)); i+=1
        i+=1
    return out
def fmt(x):
    a,t,s,y,wr,rd,wt,re_=x
    return f"{a:6x} W{wt:02x} {'w%d'%wr if wr!=7 else '--'} {'r%d'%rd if rd!=7 else '--'} {'Y' if not y else '-'} s{s:<2d} {t}"
if __name__=='__main__':
    for k,x in enumerate(load(sys.argv[1], sys.argv[2] if len(sys.argv)>2 else None)): print(f"{k:5d}", fmt(x))
