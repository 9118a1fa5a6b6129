from sim import *
import re
def steady(name,fn,start,end,takes): 
    b=load(name,fn); return path(b,start,end,takes)
base=steady('base.sass','ILi128',0x2250,0x4af0,{0x22b0:True,0x25a0:False,0x29b0:True,0x3700:True,0x39b0:True,0x49b0:False,0x4af0:True})
f=load('fa3.sass'); fa3=path(f,0xba90,0xd8e0,{0xbaf0:False,0xbb40:True,0xbe90:False,0xbee0:True})
cb,cf=count(base),count(fa3)
keys=sorted(set(cb)|set(cf),key=lambda k:-cb[k])
print("total",len(base),len(fa3)/2)
for k in keys: print(f"{k:24s} {cb[k]:5d} {cf[k]/2:6.1f}")
print('stalls base',sum(max(x[2],1) for x in base),'fa3/64',sum(max(x[2],1) for x in fa3)/2)
