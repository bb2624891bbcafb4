//! Reads the addresses of network interfaces and changes settings of interfaces (netdevice(7)), in
//! the network namespace of this thread.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterfaceSetting {
    /// The interface is up, and its other flags are off.
    Up,
    Address(Ipv4Addr),
    Netmask(Ipv4Addr),
}

/// Changes a setting of a network interface. Returns the kernel's error, for example `ENODEV` or
/// `EPERM`.
pub fn set_interface(interface: &str, setting: InterfaceSetting) -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    let (what, ifr_ifru) = match setting {
        InterfaceSetting::Up => {
            let up = libc::c_short::try_from(libc::IFF_UP).unwrap_or_default();
            (
                libc::SIOCSIFFLAGS,
                libc::__c_anonymous_ifr_ifru { ifru_flags: up },
            )
        }
        InterfaceSetting::Address(address) => (
            libc::SIOCSIFADDR,
            libc::__c_anonymous_ifr_ifru {
                ifru_addr: to_sockaddr(address),
            },
        ),
        InterfaceSetting::Netmask(mask) => (
            libc::SIOCSIFNETMASK,
            libc::__c_anonymous_ifr_ifru {
                ifru_netmask: to_sockaddr(mask),
            },
        ),
    };
    let mut ifr_name = [0; libc::IF_NAMESIZE];
    // Copy the name only up to the last byte, which stays NUL.
    for (to, from) in ifr_name
        .iter_mut()
        .take(libc::IF_NAMESIZE - 1)
        .zip(interface.bytes())
    {
        *to = from as libc::c_char;
    }
    let request = libc::ifreq { ifr_name, ifr_ifru };
    // SAFETY: the descriptor is open. For each `what` above the kernel reads an ifreq, which lives
    // for the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives a network interface an IPv6 address with a prefix of 128 bits. Returns the kernel's error.
pub fn add_ipv6(interface: &str, address: Ipv6Addr) -> io::Result<()> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
    let ifr6_ifindex = if_nametoindex(interface)?.cast_signed();
    let ifr6_addr = libc::in6_addr {
        s6_addr: address.octets(),
    };
    let request = libc::in6_ifreq {
        ifr6_addr,
        ifr6_prefixlen: 128,
        ifr6_ifindex,
    };
    // SAFETY: the descriptor is open. For an IPv6 socket the kernel reads an in6_ifreq, which lives
    // for the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the addresses of every interface.
///
/// # Errors
/// Errors of getifaddrs(3).
pub fn local_addresses() -> io::Result<Vec<IpAddr>> {
    let addresses = getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let four = address
            .as_sockaddr_in()
            .map(|address| IpAddr::V4(address.ip()));
        four.or_else(|| {
            address
                .as_sockaddr_in6()
                .map(|address| IpAddr::V6(address.ip()))
        })
    });
    Ok(addresses.collect())
}

/// Returns an address as a sockaddr_in, with port 0.
fn to_sockaddr(address: Ipv4Addr) -> libc::sockaddr {
    let mut sa_data = [0; 14];
    for (to, from) in sa_data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr {
        sa_family: libc::AF_INET as libc::sa_family_t,
        sa_data,
    }
}
